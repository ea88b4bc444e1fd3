"""A request trace through vLLM's tier in host memory, with its own policies and ours: hit rates, and CPU time.

Usage:

    python -m benchmarks vllm_replay TRACE --policy arc --policy pc_default --share 0.03 --share 0.1

This needs an environment with vLLM; `make vllm` creates one. The rules are those of `pc replay`, so hit rates can be
compared. CPU time is that of the manager of vLLM's tier; policies alternate in one process. vLLM's own policies are lru
and arc.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from time import process_time
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pc.cache.replay import replay
from pc.cache.replay.traces import Trace, digests_of, load_trace

from ..harness.experiment import Experiment, option
from ..harness.timing import over, rotated
from .replay import Run


def hashes_of(ids: np.ndarray, split: int) -> list[bytes]:
    """Return the hashes of vLLM's blocks for blocks of a trace, `split` for each."""
    digests = np.repeat(digests_of(ids), split, axis=0)
    digests[:, 0] += np.tile(np.arange(split, dtype=np.uint64), len(ids))
    return [digest.tobytes() for digest in digests]


def pass_through_tier(manager: Any, keys: list[bytes], context: Any) -> tuple[int, Any]:
    """Run one request to its end; return the number of leading chunks found, and vLLM's answer to storing all."""
    from vllm.v1.kv_offload.base import LookupResult

    manager.on_new_request(context)
    cached = next((n for n, key in enumerate(keys) if manager.lookup(key, context) != LookupResult.HIT), len(keys))
    if cached:
        manager.prepare_load(keys[:cached], context)
        manager.complete_load(keys[:cached], context)
    stored = manager.prepare_store(keys, context)
    if stored is not None:
        manager.complete_store(stored.keys_to_store, context)
    manager.on_request_finished(context)
    return cached, stored


def replay_through_tier(trace: Trace, policy: str | None, capacity: int, split: int = 1) -> Run:
    """Replay a trace through vLLM's manager of chunks in host memory.

    Args:
        trace: The requests.
        policy: A policy's name, or None for vLLM's own lru.
        capacity: Blocks of the trace.
        split: Chunks for each block of the trace.
    """
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(capacity * split, policy or "lru", "pc.integrations.vllm.offload")
    hits, seconds = 0, 0.0
    for number, ids in enumerate(trace.requests):
        keys = [make_offload_key(digest, 0) for digest in hashes_of(ids[:capacity], split)]
        context = ReqContext(str(number))
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (place + 1))
        begun = process_time()
        cached, stored = pass_through_tier(manager, keys, context)
        assert stored is not None
        seconds += process_time() - begun
        hits += cached / split
    return Run(hits / max(trace.num_blocks, 1), len(trace.requests), seconds)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for vLLM's lru and for each policy, at each capacity."""
    whole = load_trace(given.trace)
    trace = whole.part(0, given.part)
    names = [None, *(given.policy or ["pc_lru", "pc_default"])]
    for share in given.share or [0.03]:
        capacity = max(1, round(share * whole.unique_blocks))
        runs: dict[str | None, list[Run]] = {name: [] for name in names}
        for turn in range(given.rounds):
            for name in rotated(names, turn):
                runs[name].append(replay_through_tier(trace, name, capacity, given.split))
        for name, own in runs.items():
            yield {
                "trace": whole.name,
                "share": f"{share:g}",
                "blocks": capacity,
                "policy": name or "vllm",
                "hit_rate": f"{own[0].hit_rate:.4f}",
                "replay_hit_rate": f"{replay(trace, (name or 'lru').removeprefix('pc_'), capacity).hit_rate:.4f}",
                "requests": len(trace.requests),
                "request_us": f"{statistics.median(run.seconds / run.steps for run in own) * 1e6:.1f}",
                "over_vllm": f"{over(*((run.seconds for run in each) for each in (own, runs[None]))):.3f}",
            }


main = Experiment(
    "vllm_tier.csv",
    rows,
    {
        "trace": option(),
        "--policy": option(action="append", help="a name; may be given again"),
        "--share": option(type=float, action="append", help="capacity as a share of the trace's unique blocks"),
        "--part": option(1.0, "how much of the trace, from its beginning"),
        "--split": option(1, "chunks for each block of the trace"),
        "--rounds": option(3),
    },
).main
