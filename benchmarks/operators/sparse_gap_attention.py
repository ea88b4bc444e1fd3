"""pc.sparse_gap_attention: a prefix and a window with nothing between, random holes, queries inside a hole."""

from __future__ import annotations

import random
from typing import Any

from .attention import Ranges
from .attention_providers import attention_benchmark

K = 1024


def prefix_and_window(batch: int, seq_len: int, prefix: int, window: int) -> dict[str, Any]:
    """Return a decode over the first and the last tokens."""
    live = ((0, prefix), (seq_len - window, seq_len))
    return {"seq_lens": (seq_len,) * batch, "q_lens": (1,) * batch, "live": live}


def random_ranges(seq_len: int, fraction: float, spans: int = 32) -> Ranges:
    """Return spans of equal length at random places, and the last 128 tokens."""
    rng, length = random.Random(0), max(64, int(seq_len * fraction / spans) // 64 * 64)
    starts = sorted(rng.sample(range(0, seq_len - 128, length), spans))
    return (*((start, min(start + length, seq_len)) for start in starts), (seq_len - 128, seq_len))


def recompute(seq_len: int, spans: Ranges) -> dict[str, Any]:
    """Return a case that computes tokens in the middle again, with all later tokens cached."""
    return {"seq_lens": (seq_len,), "q_lens": (sum(b - a for a, b in spans),), "queries": spans}


def _short(n: int) -> str:
    return f"{n // K}k" if n % K == 0 else str(n)


def of_heads(batch: int, seq_len: int, kept: float, lists: bool, q_len: int = 1) -> dict[str, Any]:
    """Return a case in which every KV head attends to different blocks."""
    return {"seq_lens": (seq_len,) * batch, "q_lens": (q_len,) * batch, "kept": kept, "lists": lists}


CPU = [
    ("decode 1x32k, prefix 256 + window 1k", prefix_and_window(1, 32 * K, 256, K), True),
    ("decode 8x8k, prefix 1k + window 1k", prefix_and_window(8, 8 * K, K, K), False),
    (
        "decode 1x32k, a tenth at random",
        {"seq_lens": (32 * K,), "q_lens": (1,), "live": random_ranges(32 * K, 0.1)},
        True,
    ),
    ("64 queries in the middle of 8k", recompute(8 * K, ((4 * K, 4 * K + 64),)), True),
    *(
        (f"decode {b}x{_short(s)}, {round(100 * kept)}% a {form}", of_heads(b, s, kept, form != "head"), True)
        for b, s in ((1, 2 * K), (4, 8 * K))
        for form in ("head", "query and head")
        for kept in (0.5, 0.1, 0.02)
    ),
    ("64 queries behind 8k, 10% a query and head", of_heads(1, 8 * K, 0.1, True, 64), True),
]
CUDA = [
    *(
        (f"decode 8x{_short(s)}, prefix {_short(p)} + window {_short(w)}", prefix_and_window(8, s, p, w))
        for s in (8 * K, 32 * K, 128 * K)
        for p in (256, K, 4 * K)
        for w in (128, K, 4 * K)
        if p + w < s
    ),
    *(
        (
            f"decode 8x{_short(s)}, a tenth at random",
            {"seq_lens": (s,) * 8, "q_lens": (1,) * 8, "live": random_ranges(s, 0.1)},
        )
        for s in (32 * K, 128 * K)
    ),
    ("512 queries in the middle of 8k", recompute(8 * K, ((4 * K, 4 * K + 512),))),
    (
        "2k queries in eight spans of 32k",
        recompute(32 * K, tuple((i * 4 * K + K, i * 4 * K + K + 256) for i in range(8))),
    ),
    *(
        (f"decode {b}x{_short(s)}, {round(100 * kept)}% a {form}", of_heads(b, s, kept, form != "head"))
        for form in ("head", "query and head")
        for b, s in ((8, 32 * K), (1, 128 * K))
        for kept in (0.1, 0.02)
    ),
    (
        "512 queries in a hole of 32k with 90 % absent",
        {**recompute(32 * K, ((16 * K, 16 * K + 512),)), "live": (*random_ranges(16 * K, 0.1), (16 * K, 16 * K + 512))},
    ),
]
QUICK = ("decode 8x32k, prefix 1k + window 1k", "512 queries in the middle of 8k")

BENCHMARKS = (attention_benchmark("sparse_gap_attention", CPU, CUDA, QUICK),)
