"""The counters of `CacheManager.stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..allocation import CacheStats

if TYPE_CHECKING:
    from ..state import ManagerState


def stats(state: ManagerState) -> CacheStats:
    """Return the counters of a manager; see `CacheManager.stats`."""
    counts, pools = state.counts, state.pools
    found = {name: counts[name] for name in ("prefix", "gap", "partial")}
    residency = [pool.residency.totals() for pool in pools]
    return CacheStats(
        num_blocks=sum(pool.num_blocks for pool in pools),
        free_blocks=sum(pool.num_free for pool in pools),
        cached_blocks=int(sum(pool.num_cached for pool in pools)),
        held_blocks=int(sum(pool.num_held for pool in pools)),
        num_requests=len(state.running),
        total_requests=counts["requests"],
        queried_tokens=counts["queried"],
        hit_tokens=sum(found.values()),
        hit_tokens_by_cause=found,
        moved_tokens=counts["moved"],
        index_bytes=state.index_bytes,
        evictions=sum(pool.residency.evictions for pool in pools),
        offloaded_blocks=counts["offloaded"],
        failed_offloads=counts["failed_offloads"],
        merged_blocks=counts["merged"],
        residency=tuple(np.sum([counts for counts, _ in residency], axis=0).tolist()),
        residency_sum=sum(total for _, total in residency),
        preemptions=counts["preemptions"],
        host_blocks=sum(len(state.host_slots(group)) for group in range(len(pools))),
    )
