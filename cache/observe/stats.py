"""The counters of `CacheManager.stats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..state import ManagerState


@dataclass(frozen=True)
class CacheStats:
    """Counters of a manager since it was made or reset. Blocks of all groups are added up.

    Attributes:
        num_blocks: Blocks in the pools.
        free_blocks: Blocks without content.
        cached_blocks: Complete blocks with a reference count of 0. They stay published until evicted.
        held_blocks: Blocks with a reference count above 0.
        num_requests: Running requests.
        total_requests: Requests that were started.
        queried_tokens: Tokens in all prompts that `allocate` received.
        hit_tokens: Tokens of `queried_tokens` that need not be computed.
        hit_tokens_by_cause: `hit_tokens` by cause: prefix, gap (after a missing block), partial (a copied part of a
            block).
        moved_tokens: Tokens of `queried_tokens` that were cached at another position or after other text. They do not
            count as `hit_tokens`.
        index_bytes: Memory of the indexes for moved text and for parts of blocks.
        evictions: Evicted blocks.
        offloaded_blocks: Evicted blocks that a lower tier took, according to `on_evict`.
        failed_offloads: Calls of `on_evict` that raised. Their blocks are lost.
        merged_blocks: Blocks that were replaced by an equal block of another request.
        residency: Evicted blocks by the number of ticks they had been cached: up to 1, 4, 16 ... 2**20, and longer.
        residency_sum: Sum of the ticks that evicted blocks had been cached. A tick is an access or a release of a pool.
        preemptions: Preempted requests.
        host_blocks: Host slots in use.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> for request in ("a", "b"):
        ...     allocation = manager.allocate(request, range(9))
        ...     merged = manager.commit(request, 9)
        >>> stats = manager.stats()
        >>> stats.queried_tokens, stats.hit_tokens, stats.held_blocks
        (18, 8, 4)
    """

    num_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    num_requests: int
    total_requests: int
    queried_tokens: int
    hit_tokens: int
    hit_tokens_by_cause: dict[str, int]
    moved_tokens: int
    index_bytes: int
    evictions: int
    offloaded_blocks: int
    failed_offloads: int
    merged_blocks: int
    residency: tuple[int, ...]
    residency_sum: int
    preemptions: int
    host_blocks: int

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / queried_tokens`; 0 before the first request."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def stats(state: ManagerState) -> CacheStats:
    """Return the counters of a manager; see `CacheManager.stats`."""
    counts, pools = state.counts, state.pools
    found = {name: counts[name] for name in ("prefix", "gap", "partial")}
    residency = [pool.residency.totals() for pool in pools]
    evicted_by_age = np.sum([counts for counts, _ in residency], axis=0).tolist()
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
        evictions=sum(evicted_by_age),
        offloaded_blocks=counts["offloaded"],
        failed_offloads=counts["failed_offloads"],
        merged_blocks=counts["merged"],
        residency=tuple(evicted_by_age),
        residency_sum=sum(total for _, total in residency),
        preemptions=counts["preemptions"],
        host_blocks=sum(len(state.host_slots(group)) for group in range(len(pools))),
    )
