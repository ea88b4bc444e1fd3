"""The resources of every kernel, compiled without a device: registers, spills, shared memory, instructions.

The launchers run with recorders in place of kernels, so exactly what they would launch is compiled. The rows are those
of the installed triton; `make kernels` runs the command with two versions. A row of the table that holds for the
present sources is not compiled again.

Usage:

    python -m benchmarks kernels [--cases CASE ...] [--targets sm_90 ...] [--all]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime import driver as drivers

from pc.triton_ops._attention import dense
from pc.triton_ops._attention.arguments import AttentionArgs
from pc.triton_ops._attention.build import build_attention
from pc.triton_ops._copy.launch import launch_move_rows
from pc.triton_ops._core.cache import runs_kernels
from pc.triton_ops._core.operator import record_of
from pc.triton_ops._core.runtime import load_kernels
from pc.triton_ops._flash import append

from ..harness.experiment import Experiment, option
from ..harness.tables import RESULTS, Row, read_rows
from . import sass
from .launches import TARGETS, Driver, Launch, digest, on_device, patched, recorded_for

load_kernels()  # recorded launches find kernels by their class

# `pc.triton_ops.join_prefix` is the function; the module of that name has the launch of its map.
join_prefix = importlib.import_module("pc.triton_ops.join_prefix")

TABLE = RESULTS / "kernel_resources.csv"
VERSIONS = ("3.6.0", "3.9.0")
# Compiled for the most used cases only.
MINOR_TARGETS = frozenset({"sm_86", "sm_89", "sm_120"})


KEY = ("triton", "target", "case", "kernel")
COLUMNS = (
    *(*KEY, "registers", "spills", "shared", "matrix", "load_bytes"),
    *("programs", "buffers", "instructions", "per_kilobyte", "sources"),
)
"""The columns of the table.

    programs: Programs that fit on a processor at once.
    buffers: Tiles of keys, and of values, that shared memory holds: one is computed while others are loaded.
    instructions: Instructions of a warp for one tile of keys, in the loop without masks.
    per_kilobyte: Warp instructions of a program in that loop, for a KiB of keys and values.
    sources: Digest of the compiled sources; the row holds for them alone.
"""


def key(row: Row) -> tuple[str, ...]:
    """Return the columns that identify a row."""
    return tuple(row[name] for name in KEY)


def attention_case(
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    head_dim: int = 128,
    heads: tuple[int, int] = (32, 8),
    block_size: int = 16,
    q_len: int = 1,
    window: int = 0,
    positions: bool = False,
    options: bool = False,
    batch_invariant: bool = False,
    value_dim: int | None = None,
    offset: int = 0,
    head_tables: bool = False,
    tree: bool = False,
    top_k: int = 0,
    latent: bool = False,
) -> None:
    """Run an attention call on small tensors; the query begins `offset` elements after an aligned address."""
    num_seqs, max_blocks = 2, 4096 // block_size
    num_tokens = num_seqs * q_len
    elements = torch.zeros(num_tokens * heads[0] * head_dim + offset, dtype=dtype)
    query = elements[offset:].view(num_tokens, heads[0], head_dim)
    row = (head_dim,) if latent else (heads[1], head_dim)
    cache = values = torch.zeros(4, block_size, *row, dtype=cache_dtype or dtype)
    if value_dim is not None:
        values = torch.zeros(4, block_size, heads[1], value_dim, dtype=cache.dtype)
    scale = None if cache_dtype is None else torch.ones(1)
    args = AttentionArgs(
        query=query,
        key_cache=cache,
        value_cache=None if latent else values,
        block_tables=torch.zeros(num_seqs, *[heads[1]] * head_tables, max_blocks, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), 4096, dtype=torch.int32),
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32) * q_len,
        scale=0.1 if latent else head_dim**-0.5,
        query_positions=torch.zeros(num_tokens, dtype=torch.int32) if positions else None,
        window=window,
        num_sink_tokens=4 if window else 0,
        softcap=30.0 if options else 0.0,
        alibi_slopes=torch.ones(heads[0]) if options else None,
        sinks=torch.ones(heads[0]) if options else None,
        k_scale=scale,
        v_scale=None if latent else scale,
        max_query_len=q_len,
        batch_invariant=batch_invariant,
        tree_mask=torch.zeros(num_tokens, -(-q_len // 32), dtype=torch.int32) if tree else None,
    )
    if latent:
        args = args._replace(value_dim=512)
    if top_k:
        lists = torch.zeros(num_tokens, heads[1], top_k, dtype=torch.int32)
        args = args._replace(query_blocks=lists, with_lse=False)
    build_attention(args)(args)


def written(cache_dtype: torch.dtype | None, head_dim: int = 128) -> tuple[Any, ...]:
    """Return caches of keys and of values, and their scales if they have codes."""
    cache = torch.zeros(8, 16, 8, head_dim, dtype=cache_dtype or torch.bfloat16)
    scale = None if cache_dtype is None else torch.ones(1)
    return cache, cache.clone(), scale, scale


def write_case(cache_dtype: torch.dtype | None = None, head_dim: int = 128) -> None:
    """Run a cache write."""
    key, (keys, values, *scales) = torch.zeros(64, 8, head_dim, dtype=torch.bfloat16), written(cache_dtype, head_dim)
    on_device("reshape_and_cache", key, key, keys, values, torch.arange(64), *scales)


def rows_case(row: int = 4096, head_major: bool = False, tensors: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run a gather of token rows."""
    cache = torch.zeros(4, 16, row, dtype=dtype)
    if head_major:
        cache = torch.zeros(4, 8, 16, row // 8, dtype=dtype).transpose(1, 2)
    out = torch.zeros(64, *cache.shape[2:], dtype=dtype)
    launch_move_rows("rows", [cache] * tensors, [out] * tensors, (2, 1), 64, source_index=torch.arange(64))


def join_case(positions: bool = False) -> None:
    """Run a join of cached and new rows."""
    tables, lengths, starts = torch.zeros(2, 8, dtype=torch.int32), torch.tensor([64, 64]), torch.tensor([0, 8, 16])
    new_positions = torch.arange(16) if positions else None
    args = record_of(join_prefix.join_prefix_list)([], tables, lengths, [], starts, 128, new_positions)
    rows = join_prefix.launch_join_map(args, 16)
    cache, new, out = (torch.zeros(*shape, 4096, dtype=torch.bfloat16) for shape in ((4, 16), (16,), (128,)))
    launch_move_rows("join", [cache], [out], (2, 1), 128, source_index=rows, extras=[new])


def flash_case(rotary: bool = False) -> None:
    """Build tables of packed keys, or slots and angles of new keys, for FlashAttention's functions."""
    lens, tables = torch.zeros(8, dtype=torch.int32), torch.zeros(8, 256, dtype=torch.int32)
    with patched(runs_kernels, lambda tensors: True):
        if rotary:
            rotation = (torch.zeros(64, 64), torch.zeros(64, 64), lens)
            append.build_append_places(1, 16, lens, tables, rotation)(lens, tables, rotation)
        else:
            dense.build_packed_tables(lens, 4096)(lens)


def rope_case(cache_dtype: torch.dtype | None = None, interleaved: bool = False) -> None:
    """Run a rotation and cache write."""
    query, key = (torch.zeros(64, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    positions, (keys, values, *scales) = torch.arange(64), written(cache_dtype)
    new = (query, key, key, positions, torch.zeros(4096, 128))
    on_device("rope_and_cache", *new, keys, values, positions, interleaved, *scales)


def move_case(cache_dtype: torch.dtype | None = None, is_neox: bool = True, rotary_dim: int = 128) -> None:
    """Move tokens of keys and values to other slots."""
    slots = torch.arange(40)
    given = (*written(cache_dtype)[:2], slots, slots + 64, slots, torch.ones(rotary_dim // 2), is_neox)
    on_device("move_slots", *given)


def merge_case() -> None:
    """Run a merge of two results."""
    out, lse = torch.zeros(64, 32, 128, dtype=torch.bfloat16), torch.zeros(64, 32)
    on_device("merge_attention", out, lse, out, lse)


_E4M3, _PREFILL = torch.float8_e4m3fn, 512
_LATENT: dict[str, Any] = {"latent": True, "head_dim": 576, "block_size": 64, "heads": (16, 1)}
# Arguments of `attention_case`, for decodes and for prefills.
STEPS: dict[str, dict[str, Any]] = {
    "bf16 d64 g8": {"head_dim": 64, "heads": (64, 8)},
    "bf16 d128 g4": {},
    "bf16 d128 g4 block64": {"block_size": 64},
    "bf16 d256 g8": {"head_dim": 256, "heads": (8, 1)},
    "bf16 d192 values 128 g1": {"head_dim": 192, "value_dim": 128, "heads": (16, 16)},
    "bf16 d512 g8": {"head_dim": 512, "heads": (8, 1)},
    "bf16 latent g16": _LATENT,
    "bf16 latent g128": _LATENT | {"heads": (128, 1)},
    "bf16 d128 g4 window": {"window": 128},
    "bf16 d128 g4 softcap alibi sinks": {"options": True},
    "bf16 d128 g4 table per head": {"head_tables": True},
    "bf16 d128 g4 lists": {"top_k": 64},
    "bf16 d128 g4 e4m3": {"cache_dtype": _E4M3},
    "bf16 d128 g4 int8": {"cache_dtype": torch.int8},
    "fp32 d128 g4": {"dtype": torch.float32},
    "fp32 d256 g4": {"dtype": torch.float32, "head_dim": 256},
}
# Arguments of `attention_case` for one kind of step.
ATTENTION: dict[str, dict[str, Any]] = {
    **{f"decode {name}": given for name, given in STEPS.items()},
    **{f"prefill {name}": {**given, "q_len": _PREFILL} for name, given in STEPS.items()},
    "decode bf16 d128 g4 block1": {"block_size": 1},
    "decode bf16 d128 g1": {"heads": (32, 32)},
    "decode bf16 d80 g1": {"head_dim": 80, "heads": (32, 32)},
    "decode bf16 d128 g4 unaligned": {"offset": 1},
    "decode bf16 latent g16 block16": _LATENT | {"block_size": 16},
    "decode bf16 latent g16 e4m3": _LATENT | {"cache_dtype": _E4M3},
    "decode bf16 latent g128 e4m3": _LATENT | {"heads": (128, 1), "cache_dtype": _E4M3},
    "decode fp16 d128 g4 e4m3": {"dtype": torch.float16, "cache_dtype": _E4M3},
    "decode bf16 d128 g16 lists block64": {"heads": (64, 4), "block_size": 64, "top_k": 16},
    "verify bf16 d128 g4 q8": {"q_len": 8},
    "verify bf16 d128 g4 tree of 6": {"q_len": 6, "tree": True, "positions": True},
    "verify bf16 d128 g4 tree of 64": {"q_len": 64, "tree": True, "positions": True},
    "verify bf16 d128 g4 lists tree of 6": {"q_len": 6, "tree": True, "positions": True, "top_k": 64},
    "prefill bf16 d128 g4 block528": {"q_len": _PREFILL, "block_size": 528},
    "prefill bf16 d96 g1": {"q_len": _PREFILL, "head_dim": 96, "heads": (32, 32)},
    "prefill bf16 d128 g4 e4m3 lists": {"q_len": _PREFILL, "cache_dtype": _E4M3, "top_k": 64},
    "prefill bf16 d256 g8 lists": {"q_len": _PREFILL, "head_dim": 256, "heads": (8, 1), "top_k": 64},
    "prefill bf16 d128 g4 positions": {"q_len": _PREFILL, "positions": True},
    "prefill bf16 d128 g4 positions window": {"q_len": _PREFILL, "positions": True, "window": 128},
    "prefill bf16 d128 g4 invariant": {"q_len": _PREFILL, "batch_invariant": True},
}
CASES: dict[str, Callable[[], None]] = {
    **{name: functools.partial(attention_case, **given) for name, given in ATTENTION.items()},
    "write bf16 d128": write_case,
    "write bf16 d80": lambda: write_case(head_dim=80),
    "write bf16 d128 e4m3": lambda: write_case(_E4M3),
    "write bf16 d128 int8": lambda: write_case(torch.int8),
    "rope bf16 d128": rope_case,
    "rope bf16 d128 interleaved": lambda: rope_case(interleaved=True),
    "rope bf16 d128 e4m3": lambda: rope_case(_E4M3),
    "move bf16 d128": move_case,
    "move bf16 d128 interleaved rotary64": lambda: move_case(is_neox=False, rotary_dim=64),
    "move bf16 d128 e4m3": lambda: move_case(_E4M3),
    "merge bf16 d128": merge_case,
    "rows 8 KiB": rows_case,
    "rows 8 KiB head-major": lambda: rows_case(head_major=True),
    "rows 8 KiB, 8 tensors": lambda: rows_case(tensors=8),
    "rows 33 bytes": lambda: rows_case(33, dtype=torch.int8),
    "join 8 KiB": join_case,
    "join 8 KiB positions": lambda: join_case(positions=True),
    "flash packed": flash_case,
    "flash new keys rotary": lambda: flash_case(rotary=True),
}

MERGED_CASE = "decode bf16 d128 g4"
# What most models launch: compiled for every target, and compared by the tests.
MAIN_CASES = (
    "decode bf16 d128 g4",
    "decode bf16 d128 g4 block64",
    "decode bf16 d128 g4 e4m3",
    "decode bf16 d256 g8",
    "prefill bf16 d128 g4",
)


def targets_of(case: str) -> list[str]:
    """Return the targets that a case is compiled for."""
    return [target for target in TARGETS if target not in MINOR_TARGETS or case in MAIN_CASES]


def compile_launch(entry: Launch, target: str) -> Any:
    """Compile a recorded launch for a target as triton's own launcher does, without launching it."""
    options = dict(entry.options)
    if TARGETS[target].gpu.backend == "hip":
        options.pop("maxnreg", None)  # launches leave it out where torch is built for AMD
    with mock.patch.object(drivers, "_active", Driver(target)):
        return entry.kernel.run(**entry.arguments, **options, grid=entry.grid, warmup=True)


def _nvidia(compiled: Any, target: str, entry: Launch) -> dict[str, Any]:
    usage = sass.tool("cuobjdump", compiled.asm["cubin"], "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", usage)
    assert match, usage
    found: dict[str, Any] = {}
    registers, num_warps = int(match[1]), compiled.metadata.num_warps
    if "key_ptr" in entry.arguments and "BLOCK_N" in entry.arguments:
        found["programs"] = sass.programs_per_processor(target, registers, compiled.metadata.shared, num_warps)
        found["buffers"] = sass.buffers(compiled.asm["ttgir"])
        if instructions := sass.loop_instructions(compiled.asm["cubin"]):
            found["instructions"] = instructions
            if "DECODE" in entry.arguments:
                work = instructions * num_warps / sass.tile_kilobytes(entry.arguments)
                found["per_kilobyte"] = round(work, 1)
    ptx = compiled.asm["ptx"]
    names = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x([0-9a-f]+)", ptx)
    loads = [int(count, 16) for count in copies]
    widths = re.findall(r"ld\.global(?:\.\w+::\w+)*(?:\.L\d::\w+)*(?:\.v(\d))?\.[bfu](\d+)", ptx)
    loads += [int(vector or 1) * int(bits) // 8 for vector, bits in widths]
    return found | {
        "registers": registers,
        "spills": int(match[2]) + int(match[3]),
        "matrix": " ".join(name for name, text in names.items() if text in ptx),
        "load_bytes": max(loads, default=0),
    }


def _amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]
    numbers = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]
    loads = re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?", text)
    return {
        "registers": numbers["vgpr_count"],
        "spills": numbers["vgpr_spill_count"],
        "matrix": "mfma" if "v_mfma" in text else "",
        "load_bytes": max((4 * int(n or 1) for n in loads), default=0),
    }


def launched(cases: Iterable[str], target: str) -> list[tuple[Row, Launch]]:
    """Return a row for each kernel that the cases launch, without its measurements, and the recorded launch."""
    found = []
    with recorded_for(target) as launches:
        for case in cases:
            launches.clear()
            CASES[case]()
            for entry in launches:
                name = entry.kernel.__name__.strip("_").removesuffix("_kernel")
                # One case shows the plan and the merge; a prefill's launch for short sequences is that of "verify".
                is_shown = case == MERGED_CASE or name not in ("plan_tiles", "plan_items", "merge_splits")
                if is_shown and not (entry.arguments.get("DECODE") and "prefill" in case):
                    named = zip(KEY, (triton.__version__, target, case, name), strict=True)
                    found.append((dict.fromkeys(COLUMNS, "") | {**dict(named), "sources": digest([entry])}, entry))
    return found


def measure(case: str, target: str, again: bool = True) -> Iterator[Row]:
    """Yield a row for each kernel that a case launches: the table's if it holds, unless all are measured `again`."""
    known = {} if again else read_table()
    for row, entry in launched([case], target):
        if key(row) in known and known[key(row)]["sources"] == row["sources"]:
            yield known[key(row)]
            continue
        compiled = compile_launch(entry, target)
        is_amd = TARGETS[target].gpu.backend == "hip"
        found = _amd(compiled) if is_amd else _nvidia(compiled, target, entry)
        yield row | {name: str(value) for name, value in found.items()} | {"shared": str(compiled.metadata.shared)}


def read_table(path: Path = TABLE) -> dict[tuple[str, ...], Row]:
    """Return the rows of a table by their key."""
    return {key(row): row for row in read_rows(path)}


SPILLS = {("3.6.0", "gfx942", "decode bf16 latent g16 e4m3")}
"""Cases that may spill: two registers there, and none with newer versions of triton."""


def complaints(row: Row) -> list[str]:
    """Return the faults of a row: spills, too much shared memory, no matrix instruction, narrow loads."""
    limit, is_attention = TARGETS[row["target"]].shared, row["kernel"] == "attention"
    is_wide = is_attention or (row["kernel"] == "move_rows" and "KiB" in row["case"])
    faults = {
        f"{row['spills']} bytes of spills": row["spills"] != "0" and key(row)[:3] not in SPILLS,
        f"{row['shared']} bytes of shared memory, {limit} at most": int(row["shared"]) > limit,
        "no matrix instruction": is_attention and "fp32" not in row["case"] and not row["matrix"],
        f"loads of {row['load_bytes']} bytes": is_wide and row["load_bytes"] != "16",
    }
    return [fault for fault, is_there in faults.items() if is_there]


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of each case and target; at the end, exit with 1 if one has a fault."""
    wrong = []
    for case in given.cases:
        for target in (target for target in targets_of(case) if target in given.targets):
            for row in measure(case, target, given.all):
                wrong += [f"{key(row)}: {complaint}" for complaint in complaints(row)]
                yield row
    if wrong:
        raise SystemExit("\n".join(wrong))


main = Experiment(
    "../kernel_resources.csv",
    rows,
    {
        "--cases": option(list(CASES), choices=list(CASES), metavar="CASE"),
        "--targets": option(list(TARGETS), choices=list(TARGETS)),
        "--all": option(False, "compile for rows that hold too"),
    },
    KEY,
    conditions=False,
).main
