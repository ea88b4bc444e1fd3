"""Sweeps of the constants of attention kernels: other tiles, and other numbers of programs, beside those in use.

A sweep is a benchmark like those of operators, and `python -m benchmarks gpu` measures it in the same way. Wrong
results are not timed, all candidates take turns, and the rows are in a CSV file. Nothing takes over the fastest
candidate. Whoever reads the rows changes the rules in `triton_ops/_attention/constants.py`, and checks the change with
the cases of `paged_attention`.

Examples:
    python -m benchmarks gpu --only sweep
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import pc
from pc.triton_ops._attention import build
from pc.triton_ops._attention.arguments import AttentionArgs
from pc.triton_ops._attention.constants import DECODE_REGISTERS, Tiles
from pc.triton_ops._core.cache import forget_choices

from ..harness.registry import Benchmark, Case, Provider
from ..operators.attention import AttentionCall, attention_case, uniform
from ..operators.attention_providers import make_plan, ours

# Heads as models of that head_dim have them: Llama 3, gpt-oss, Gemma 3. What serves most comes first.
HEADS = {128: (32, 8), 64: (64, 8), 256: (8, 4)}
STAGES = (2, 3, 4, 5, 6)
PROGRAM_COUNTS = (2, 3, 4, 6, 8, 16)
PREFILL_SHAPES = ((64, 32, 4), (64, 32, 8), (64, 64, 4), (64, 64, 8), (128, 32, 8), (128, 64, 8), (128, 128, 8))
"""Rows, keys and warps. Four warps spill with 128 rows, and 64 rows are few for 128 keys."""


def _candidates(kind: str) -> Iterator[tuple[str, str, Tiles | int]]:
    """Yield what a sweep compares: its name, the function of `build` that returns a constant, and another result."""
    if kind == "decode":
        grid = itertools.product((16, 32, 64), (2, 4), STAGES)
        # With the register limit of the rules, because the compiler would spill without it.
        found = [Tiles(16, keys, warps, n, True, max_registers=DECODE_REGISTERS[warps]) for keys, warps, n in grid]
    else:
        found = [Tiles(*each, n, loops) for each, n, loops in itertools.product(PREFILL_SHAPES, STAGES, (False, True))]
    for tiles in found:
        name = f"{tiles.block_m}x{tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages"
        yield f"{name}{', two loops' if tiles.two_loops else ''}", f"{kind}_tiles", tiles
    for count in PROGRAM_COUNTS if kind == "decode" else ():
        yield f"{count} programs a processor", "programs_per_processor", count


def _prepare(call: AttentionCall, rule: str, result: Tiles | int) -> Callable[[], object]:
    """Return a call of paged attention for which a function of `build` returned another constant.

    The launch is built here, since the operator remembers launches by their metadata.
    """
    arguments = call.arguments("paged_attention")
    try:
        with mock.patch.object(build, rule, return_value=result):
            forget_choices()
            args = AttentionArgs(**arguments, plan=make_plan(call, arguments), with_lse=False)
            run = build.build_attention(args)
    finally:
        forget_choices()
    return lambda: run(args)


def _providers(kind: str) -> Iterator[Provider]:
    """Yield the operator with the constants in use, then each candidate; on a CPU two show that a sweep runs."""
    yield ours("paged_attention")
    for number, (name, rule, result) in enumerate(_candidates(kind)):
        prepare = functools.partial(_prepare, rule=rule, result=result)
        yield Provider(name, prepare, lambda: pc.__version__, None if number < 2 else "cuda")


def _cases(kind: str) -> Iterator[Case]:
    for device, (head_dim, heads), block_size in itertools.product(("cpu", "cuda"), HEADS.items(), (16, 64)):
        length, batch = (4096, 8) if device == "cuda" else (128, 2)
        lengths = uniform(batch, length) if kind == "decode" else uniform(1, length, length)
        heads = heads if device == "cuda" else (heads[0] // heads[1], 1)
        name = f"{kind} head_dim {head_dim} block {block_size}"
        yield attention_case(name, device, True, **lengths, heads=heads, head_dim=head_dim, block_size=block_size)


BENCHMARKS = tuple(
    Benchmark(f"sweep_{kind}", tuple(_cases(kind)), tuple(_providers(kind))) for kind in ("decode", "prefill")
)
