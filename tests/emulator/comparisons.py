"""Comparisons of compiled kernels by the expression of the source that they come from, and what breaking them does.

A comparison of the source is compiled to an instruction for each element that a lane holds, and again for each kernel
that inlines it. Each of these copies is one that no case's operands were ever equal in ("not met": there `<` and `<=`
are the same), or one whose neighbour makes a case fail ("noticed"), or neither ("no effect"). Kernels are broken in
place, so that a copy costs a run of its case and no translation.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .cases import run
from .program import Program, edited, program
from .ptx import EmulationError

SOURCES = Path(__file__).resolve().parents[2] / "triton_ops"
INTEGERS = re.compile(r"setp\.(?:lt|le|gt|ge)\.[su]\d\d")
# CPU seconds of cases for each copy.
PATIENCE = 1.5
NOT_MET, NOTICED, NO_EFFECT, LEFT_OUT = "not met", "noticed", "no effect", "left out"


@dataclass
class Copy:
    """A comparison of a kernel: instruction number `index`, and the cases that met its boundary."""

    kernel: Program
    index: int
    cases: list[str] = field(default_factory=list)


@functools.cache
def _expressions(path: str) -> dict[tuple[int, int], str]:
    """Return the expression at each line and column of a source file: a comparison, else a loop, else any other."""
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for node in ast.walk(ast.parse((SOURCES / path).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.expr, ast.stmt)):
            rank = 0 if isinstance(node, ast.Compare) else 1 if isinstance(node, ast.For) else 2
            key, text = (node.lineno, node.col_offset + 1), ast.unparse(node).split("\n")[0].removesuffix(":")
            if key not in found or rank < found[key][0]:
                found[key] = rank, text
    return {key: text for key, (_, text) in found.items()}


def place(kernel: Program, index: int) -> str:
    """Return the file and expression of a comparison, or the kernel if the compiler made it from several."""
    source = kernel.source(index)
    path, _, inside = source[0].rpartition("triton_ops/") if source else ("", "", "")
    text = _expressions(inside).get(source[1:]) if source and path else None
    return f"{inside}: {text}" if text else f"{kernel.name}: several"


def places(names: Sequence[str]) -> tuple[dict[str, list[Copy]], dict[str, float]]:
    """Return every integer comparison that the cases run, by place, and the CPU seconds of the cases."""
    seconds: dict[str, float] = {}
    seen: dict[str, str] = {}

    def look(name: str, ptx: str) -> str:
        seen[ptx] = name
        return ptx

    copies: dict[tuple[Program, int], Copy] = {}
    for case in names:
        with edited(look):
            run(case)
        kernels = [program(name, ptx) for ptx, name in seen.items()]
        before = [kernel.counts() for kernel in kernels]
        start = time.process_time()
        run(case)
        seconds[case] = time.process_time() - start
        for kernel, (ran, ties) in zip(kernels, before, strict=True):
            now_ran, now_ties = kernel.counts()
            for index in map(int, np.flatnonzero(now_ran - ran)):
                if INTEGERS.search(kernel.code[index].statement.text):
                    copy = copies.setdefault((kernel, index), Copy(kernel, index))
                    if now_ties[index] > ties[index]:
                        copy.cases.append(case)
    found: dict[str, list[Copy]] = {}
    for copy in copies.values():
        found.setdefault(place(copy.kernel, copy.index), []).append(copy)
    return dict(sorted(found.items())), seconds


def _fails(copy: Copy, case: str) -> bool:
    try:
        with copy.kernel.flipped(copy.index):
            run(case)
    except (AssertionError, EmulationError, RuntimeError):
        return True
    return False


def outcome(copy: Copy, seconds: dict[str, float]) -> str:
    """Return a copy's outcome: cases that met its boundary run for some time, the fastest first."""
    spent = 0.0
    for case in sorted(copy.cases, key=seconds.__getitem__):
        if spent > PATIENCE:
            break
        if _fails(copy, case):
            return NOTICED
        spent += seconds[case]
    return NO_EFFECT if copy.cases else NOT_MET


def outcomes(names: Sequence[str], count: int, seed: int = 0) -> Iterator[tuple[str, Counter[str], list[Copy]]]:
    """Yield, for each place, how many copies had which outcome, and those without an effect.

    Args:
        names: The cases.
        count: The number of copies of a place, drawn at random from those that were met, which are broken. 0: all.
        seed: The seed of the draw.
    """
    everything, seconds = places(names)
    for text, copies in everything.items():
        met = [copy for copy in copies if copy.cases]
        drawn = random.Random(seed).sample(met, min(count, len(met))) if count else met
        found, same = Counter({NOT_MET: len(copies) - len(met), LEFT_OUT: len(met) - len(drawn)}), []
        for copy in drawn:
            result = outcome(copy, seconds)
            found[result] += 1
            if result == NO_EFFECT:
                same.append(copy)
        yield text, found, same
