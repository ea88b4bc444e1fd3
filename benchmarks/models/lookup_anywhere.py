"""The cost of `allocate(reuse="anywhere")` beside a plain call, with nothing or everything cached elsewhere.

Usage:

    python -m benchmarks lookup_anywhere [--lengths 1024 16384 131072]

Two managers take the same prompts in turn. The cache holds three prompts, so each prompt evicts.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import pc

from ..harness.experiment import Experiment, option
from ..harness.timing import rotated

BLOCK, PROMPTS_CACHED = 16, 3
WAYS = ("prefix", "anywhere")


def manager_of(reuse: str, length: int) -> pc.CacheManager:
    """Return a manager whose cache is full of prompts of this length."""
    manager = pc.CacheManager((PROMPTS_CACHED + 1) * (length // BLOCK + 1), BLOCK, policy="lru")
    for number in range(PROMPTS_CACHED + 1):
        text = np.random.default_rng(number).integers(0, 50_000, length)
        manager.allocate(number, text, reuse=reuse)
        manager.commit(number, length)
        manager.free(number)
    return manager


def measure(length: int, found: bool, rounds: int) -> dict[str, tuple[float, float]]:
    """Return each way's median seconds of `allocate` and of a whole request.

    Args:
        length: Tokens of a prompt.
        found: Whether the cache has the prompt, moved by a token.
        rounds: Requests of each way.
    """
    managers = {reuse: manager_of(reuse, length) for reuse in WAYS}
    times: dict[str, list[tuple[float, float]]] = {reuse: [] for reuse in WAYS}
    old = np.random.default_rng(PROMPTS_CACHED).integers(0, 50_000, length)
    rng = np.random.default_rng(99)
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        fresh = rng.integers(0, 50_000, length)
        text = (np.append(fresh[:1], old[:-1]) if found else fresh).tolist()
        for reuse in rotated(WAYS, number):
            manager, tokens = managers[reuse], list(text)
            begin = time.perf_counter()
            allocation = manager.allocate("one", tokens, reuse=reuse)
            allocated = time.perf_counter()
            if not found:  # else the text would be there twice, and then a prefix
                manager.commit("one", length)
            manager.free("one")
            times[reuse].append((allocated - begin, time.perf_counter() - begin))
            moved = sum(span.end - span.start for span in allocation.moved)
            assert moved == (length - 2 if found and reuse == "anywhere" else 0)  # the last token is always computed
    gc.unfreeze()
    return {
        reuse: tuple(statistics.median(part) for part in zip(*spent, strict=True)) for reuse, spent in times.items()
    }


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each length, with nothing and with everything cached elsewhere."""
    for length in given.lengths:
        for found in (False, True):
            times = measure(length, found, max(20, min(400, 4_000_000 // length)))
            (plain, whole), (anywhere, all_of_it) = (times[reuse] for reuse in WAYS)
            yield {
                "tokens": length,
                "found": "all" if found else "nothing",
                "plain_us": f"{plain * 1e6:.1f}",
                "anywhere_us": f"{anywhere * 1e6:.1f}",
                "over_plain": f"{anywhere / plain:.3f}",
                "request_over_plain": f"{all_of_it / whole:.3f}",
            }


main = Experiment("lookup_anywhere.csv", rows, {"--lengths": option([1024, 16384, 131072], "tokens of a prompt")}).main
