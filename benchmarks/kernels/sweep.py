"""Sweeps of the constants of attention kernels: other tiles, and other numbers of programs, beside those in use.

A sweep is a benchmark like those of operators, and `python -m benchmarks gpu` measures it in the same way. Wrong
results are not timed, all candidates take turns, and the rows are in a CSV file. Nothing takes over the fastest
candidate. Whoever reads the rows changes the rules in `triton_ops/_attention/constants.py`, and checks the change with
the cases of `paged_attention`.

Examples:
    python -m benchmarks gpu --only sweep
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import pc
from pc.triton_ops._attention import build
from pc.triton_ops._attention.arguments import AttentionArgs
from pc.triton_ops._attention.constants import DECODE_REGISTERS, PROGRAMS, Tiles, architecture
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


def _tiles(kind: str) -> Iterator[Tiles]:
    """Yield the tiles that a sweep compares."""
    if kind == "decode":
        for keys, warps, stages in itertools.product((16, 32, 64), (2, 4), STAGES):
            # With the register limit of the rules, because the compiler would spill without it.
            yield Tiles(16, keys, warps, stages, True, max_registers=DECODE_REGISTERS[warps])
    else:
        for shape, stages, loops in itertools.product(PREFILL_SHAPES, STAGES, (False, True)):
            yield Tiles(*shape, stages, loops)


def _prepare(call: AttentionCall, kind: str, tiles: Tiles | None, programs: int | None) -> Callable[[], object]:
    """Return a call of paged attention with other constants; None: those in use.

    The launch is built here, since the operator remembers launches by their metadata.
    """
    arguments = call.arguments("paged_attention")
    with contextlib.ExitStack() as stack:
        stack.callback(forget_choices)
        if tiles is not None:
            stack.enter_context(mock.patch.object(build, f"{kind}_tiles", return_value=tiles))
        if programs is not None:
            arch = architecture(call.query.device).name
            stack.enter_context(mock.patch.dict(PROGRAMS, {arch: (programs, "")}))
        forget_choices()
        args = AttentionArgs(**arguments, plan=make_plan(call, arguments), with_lse=False)
        run = build.build_attention(args)
    return lambda: run(args)


def _providers(kind: str) -> Iterator[Provider]:
    """Yield the operator with the constants in use, then each candidate; on a CPU two show that a sweep runs."""
    yield ours("paged_attention")
    candidates: list[tuple[str, Tiles | None, int | None]] = [
        (
            f"{tiles.block_m}x{tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages"
            f"{', two loops' if tiles.two_loops else ''}",
            tiles,
            None,
        )
        for tiles in _tiles(kind)
    ]
    if kind == "decode":
        candidates += [(f"{count} programs a processor", None, count) for count in PROGRAM_COUNTS]
    for number, (name, tiles, programs) in enumerate(candidates):
        prepare = functools.partial(_prepare, kind=kind, tiles=tiles, programs=programs)
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
