"""A request trace through vLLM's tier in host memory, with its own policies and ours: hit rates, and CPU time.

This needs an environment with vLLM; `make vllm` creates one. The rules are those of `pc replay`, so hit rates can be
compared. CPU time is that of the manager of vLLM's tier; policies alternate in one process. vLLM's own policies are lru
and arc.

Examples:
    python -m benchmarks vllm_replay TRACE --policy arc pc_default --share 0.03 0.1
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import process_time
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pc.cache.replay.traces import Trace, digests_of

from ..harness.timing import frozen
from .replay import Engine, Run


def hashes_of(ids: np.ndarray, split: int) -> list[bytes]:
    """Return the hashes of vLLM's blocks for blocks of a trace, `split` for each."""
    digests = np.repeat(digests_of(ids), split, axis=0)
    digests[:, 0] += np.tile(np.arange(split, dtype=np.uint64), len(ids))
    return [digest.tobytes() for digest in digests]


def make_context(name: str, keys: Sequence[Any], tokens: int = 16, **fields: Any) -> Any:
    """Return vLLM's context of a request whose chunks, each of so many tokens, have these keys."""
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext(name, **fields)
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, tokens * (place + 1))
    return context


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


def run(trace: Trace, policy: str | None, capacity: int, split: int = 1, at_once: int = 1, longest: int = 1) -> Run:
    """Replay a trace through vLLM's manager of chunks in host memory, one request after the other.

    Args:
        trace: The requests.
        policy: A policy's name, or None for vLLM's own lru.
        capacity: Blocks of the trace.
        split: Chunks for each block of the trace.
        at_once: Unused, since the tier has no running requests.
        longest: Unused, since the tier stores prompts only.
    """
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(capacity * split, policy or "lru", "pc.integrations.vllm.offload")
    hits, seconds = 0.0, 0.0
    with frozen():
        for number, ids in enumerate(trace.requests):
            keys = [make_offload_key(digest, 0) for digest in hashes_of(ids[:capacity], split)]
            context = make_context(str(number), keys)
            begun = process_time()
            cached, stored = pass_through_tier(manager, keys, context)
            assert stored is not None
            seconds += process_time() - begun
            hits += cached / split
    return Run(hits / max(trace.num_blocks, 1), len(trace.requests), seconds)


def ways(policies: Sequence[str]) -> dict[str | None, dict[str, str]]:
    """Return vLLM's lru and the policies, with their columns."""
    return {None: {"policy": "vllm"}, **{name: {"policy": name} for name in policies or ("arc", "pc_default")}}


main = Engine(run, ways, {"vllm": None}).experiment("vllm_tier.csv", __doc__).main
