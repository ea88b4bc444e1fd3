"""Facts from a kernel's compiled Nvidia code: its loops, their instructions, programs per processor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

from .launches import TARGETS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
RESERVED = 1024
"""Bytes of shared memory that each program takes besides its own.

A processor has these in addition to the most that one program may have.
"""
_MATRIX = re.compile(r"\b(?:[HIQD]MMA|[HIQ]GMMA|UTC\w*MMA)\b")


def tool(name: str, cubin: bytes, *options: str) -> str:
    """Return the output of one of triton's tools for a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([TOOLS / name, *options, file.name], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def loop_instructions(cubin: bytes) -> int | None:
    """Return the instructions of the innermost loop that multiplies matrices without masks; None if there is none.

    If there are several, this is the loop with the fewest instructions for each load. Steps of others may have fewer
    keys.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in tool("nvdisasm", cubin, "-c").splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    loops = []
    for end, instruction in enumerate(code):
        branch = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
        if branch and labels.get(branch[1], end + 1) <= end:
            loops.append((labels[branch[1]], end))
    loops = [(begin, end) for begin, end in loops if any(_MATRIX.search(line) for line in code[begin : end + 1])]
    inner = [
        [line for line in code[begin : end + 1] if not line.endswith("NOP")]
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]
    if not inner:
        return None
    return len(min(inner, key=lambda lines: (len(lines) / max(1, sum("LDGSTS" in line for line in lines)), len(lines))))


def buffers(ttgir: str) -> int:
    """Return how many tiles of keys, and of values, shared memory holds at once; 0 if loads are not pipelined."""
    found = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?:bf16|f16|f32|f8E4M3FN|i8)", ttgir)
    return min((int(count) for count in found), default=0)


def programs_per_processor(target: str, registers: int, shared: int, num_warps: int) -> int:
    """Return how many programs fit on a processor at once."""
    own, device = -(-registers // 8) * 8 * 32 * num_warps, TARGETS[target]
    memory = device.shared + RESERVED
    return min(65_536 // own, memory // (shared + RESERVED), device.threads // (32 * num_warps))


def tile_kilobytes(arguments: dict[str, Any]) -> float:
    """Return the KiB of keys and values in one step of an attention kernel."""
    itemsize = arguments["key_ptr"].dtype.itemsize
    columns = arguments["HEAD_DIM"] + arguments["VALUE_DIM"]
    if arguments["ROPE_COLUMNS"]:  # values are in keys
        columns = arguments["VALUE_DIM"] + arguments["ROPE_COLUMNS"]
    return float(arguments["BLOCK_N"] * columns * itemsize / 1024)
