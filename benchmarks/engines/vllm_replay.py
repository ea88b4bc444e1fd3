"""A request trace through vLLM's own block manager, with its queue or a policy of `pc`: hit rates, and CPU time.

Usage:

    python -m benchmarks vllm_replay TRACE --policy lru --policy default --share 0.03
    python -m benchmarks vllm_replay TRACE --tier --policy arc --policy pc_default --share 0.03 --share 0.1

This needs an environment with vLLM; `make vllm` creates one. The rules are those of `pc replay`, so hit rates can be
compared. CPU time is that of vLLM's manager without its scheduler; policies alternate in one process. `--tier` replays
through the manager of vLLM's tier in host memory, whose own policies are lru and arc. Writes results/cpu/vllm_tier.csv.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pc.cache.replay import replay
from pc.cache.replay.traces import Trace, digests_of, load_trace

from ..harness.conditions import conditions
from ..harness.tables import RESULTS, write_rows
from ..harness.timing import over

TIER_ROWS = RESULTS / "cpu" / "vllm_tier.csv"


@dataclass(frozen=True)
class Result:
    """The outcome of vLLM's manager with one policy."""

    policy: str
    hit_rate: float
    """Share of blocks in leading runs of cached blocks."""
    seconds: float
    """CPU time of lookups, allocations and frees."""


def hashes_of(ids: np.ndarray, split: int) -> list[bytes]:
    """Return the hashes of vLLM's blocks for blocks of a trace, `split` for each."""
    digests = np.repeat(digests_of(ids), split, axis=0)
    digests[:, 0] += np.tile(np.arange(split, dtype=np.uint64), len(ids))
    return [digest.tobytes() for digest in digests]


def make_manager(num_blocks: int, policy: str | None) -> Any:
    """VLLM's manager of blocks of two tokens, with a policy, or with its own queue."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
    manager = KVCacheManager(config, max_model_len=1 << 24, scheduler_block_size=2, hash_block_size=2)
    if policy is not None:
        from pc.integrations.vllm.eviction import install_policy

        install_policy(manager.block_pool, policy)
    return manager


def replay_through_vllm(trace: Trace, policy: str | None, capacity: int, split: int = 1) -> Result:
    """Runs a trace; each block of it is a block of two tokens here, and one more token follows, so that all can be hit.

    Args:
        trace: The requests.
        policy: A policy's name; None: vLLM's own queue.
        capacity: Blocks of the trace, vLLM's null block and the one of the last token not counted.
        split: How many blocks of vLLM a block of the trace is: 32 where it has 512 tokens and vLLM 16.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    manager = make_manager(capacity * split + 2, policy)
    sampling = SamplingParams(max_tokens=1)
    hits, seconds = 0, 0.0
    for number, (ids, output) in enumerate(zip(trace.requests, trace.outputs, strict=True)):
        ids = ids[:capacity]
        hashes = hashes_of(ids, split)
        given = iter([hashes])
        request = Request(
            str(number),
            [0] * (2 * len(hashes) + 1),
            sampling,
            None,
            block_hasher=lambda _, given=given: next(given, []),
        )
        begun = process_time()
        blocks, cached = manager.get_computed_blocks(request)[:2]
        allocated = manager.allocate_slots(request, 2 * len(hashes) + 1 - cached, cached, blocks)
        assert allocated is not None
        if policy is not None:
            manager.block_pool.policy_state.finished(output, None)
        manager.free(request)
        seconds += process_time() - begun
        hits += cached // 2 / split
    return Result(policy or "vllm", hits / max(trace.num_blocks, 1), seconds)


def pass_through_tier(manager: Any, keys: list[bytes], context: Any) -> tuple[int, Any]:
    """One request, to its end: chunks found from the first on, and what vLLM's manager said of storing all."""
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


def replay_through_tier(trace: Trace, policy: str | None, capacity: int, split: int = 1) -> Result:
    """Replay through vLLM's manager of chunks in host memory, like `replay_through_vllm`; None is vLLM's own lru."""
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
    return Result(policy or "vllm", hits / max(trace.num_blocks, 1), seconds)


def compare(trace: Trace, whole: Trace, share: float, given: argparse.Namespace) -> list[dict[str, str]]:
    """A row for vLLM's own and one for each policy; prints them."""
    capacity = max(1, round(share * whole.unique_blocks))
    names = [None, *(given.policy or (["pc_lru", "pc_default"] if given.tier else ["lru", "default"]))]
    passing = replay_through_tier if given.tier else replay_through_vllm
    runs: dict[str | None, list[Result]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name in names:
            runs[name].append(passing(trace, name, capacity, given.split))
    base = [run.seconds for run in runs[None]]
    print(f"{trace.name}, {len(trace.requests)} requests, {trace.num_blocks} blocks, {capacity} blocks of capacity")
    rows = []
    for name in names:
        ratio = over((run.seconds for run in runs[name]), base)
        ours = (name or "lru").removeprefix("pc_")
        row = {
            "trace": whole.name,
            "share": f"{share:g}",
            "blocks": str(capacity),
            "policy": name or "vllm",
            "hit_rate": f"{runs[name][0].hit_rate:.4f}",
            "replay_hit_rate": f"{replay(trace, ours, capacity).hit_rate:.4f}",
            "requests": str(len(trace.requests)),
            "request_us": f"{statistics.median(run.seconds for run in runs[name]) / len(trace.requests) * 1e6:.1f}",
            "over_vllm": f"{ratio:.3f}",
        }
        print(*row.values(), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Prints hit rates, and CPU time as a share of that with vLLM's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--policy", action="append", help="a name; may be given again")
    parser.add_argument("--share", type=float, action="append", help="capacity as a share of the trace's unique blocks")
    parser.add_argument("--part", type=float, default=1.0, help="how much of the trace, from its beginning")
    parser.add_argument("--split", type=int, default=1, help="blocks of vLLM for each block of the trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tier", action="store_true", help="vLLM's tier in host memory, not its block manager")
    given = parser.parse_args()
    whole = load_trace(given.trace)
    trace = whole.part(0, given.part)
    rows = [row for share in given.share or [0.03] for row in compare(trace, whole, share, given)]
    if given.tier:
        write_rows(TIER_ROWS, [row | conditions("cpu") for row in rows])
