"""pc.sparse_gap_attention: a prefix and a window with nothing between, random holes, queries inside a hole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .attention import Ranges, uniform
from .attention_providers import attention_benchmark

K = 1024


def prefix_and_window(batch: int, seq_len: int, prefix: int, window: int) -> dict[str, Any]:
    """Return a decode over the first and the last tokens."""
    return uniform(batch, seq_len, live=((0, prefix), (seq_len - window, seq_len)))


def random_ranges(seq_len: int, fraction: float = 0.1, spans: int = 32) -> Ranges:
    """Return spans of equal length at random places, and the last 128 tokens."""
    rng, length = random.Random(0), max(64, int(seq_len * fraction / spans) // 64 * 64)
    starts = sorted(rng.sample(range(0, seq_len - 128, length), spans))
    return (*((start, min(start + length, seq_len)) for start in starts), (seq_len - 128, seq_len))


def recompute(seq_len: int, *spans: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Return a case that computes tokens in the middle again, with all later tokens cached."""
    return uniform(1, seq_len, sum(end - begin for begin, end in spans), queries=spans, **more)


def _short(n: int) -> str:
    return f"{n // K}k" if n % K == 0 else str(n)


def of_heads(shapes: Iterable[tuple[int, int]], shares: Sequence[float]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield decodes in which every KV head attends to different blocks, by tables of heads and by lists of queries."""
    for (batch, seq_len), form, kept in itertools.product(shapes, ("head", "query and head"), shares):
        name = f"decode {batch}x{_short(seq_len)}, {round(100 * kept)}% a {form}"
        yield name, uniform(batch, seq_len, kept=kept, lists=form != "head")


CPU = [
    ("decode 1x32k, prefix 256 + window 1k", prefix_and_window(1, 32 * K, 256, K), True),
    ("decode 8x8k, prefix 1k + window 1k", prefix_and_window(8, 8 * K, K, K), False),
    ("decode 1x32k, a tenth at random", uniform(1, 32 * K, live=random_ranges(32 * K)), True),
    ("64 queries in the middle of 8k", recompute(8 * K, (4 * K, 4 * K + 64)), True),
    *((name, given, True) for name, given in of_heads(((1, 2 * K), (4, 8 * K)), (0.5, 0.1, 0.02))),
    ("64 queries behind 8k, 10% a query and head", uniform(1, 8 * K, 64, kept=0.1, lists=True), True),
]
HOLE = (16 * K, 16 * K + 512)
CUDA = [
    *(
        (f"decode 8x{_short(s)}, prefix {_short(p)} + window {_short(w)}", prefix_and_window(8, s, p, w))
        for s in (8 * K, 32 * K, 128 * K)
        for p in (256, K, 4 * K)
        for w in (128, K, 4 * K)
        if p + w < s
    ),
    *((f"decode 8x{_short(s)}, a tenth at random", uniform(8, s, live=random_ranges(s))) for s in (32 * K, 128 * K)),
    ("512 queries in the middle of 8k", recompute(8 * K, (4 * K, 4 * K + 512))),
    ("2k queries in eight spans of 32k", recompute(32 * K, *((i * K, i * K + 256) for i in range(1, 32, 4)))),
    *of_heads(((8, 32 * K), (1, 128 * K)), (0.1, 0.02)),
    ("512 queries in a hole of 32k with 90 % absent", recompute(32 * K, HOLE, live=(*random_ranges(16 * K), HOLE))),
]
QUICK = ("decode 8x32k, prefix 1k + window 1k", "512 queries in the middle of 8k")

BENCHMARKS = (attention_benchmark("sparse_gap_attention", CPU, CUDA, QUICK),)
