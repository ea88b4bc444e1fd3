"""The least recently used unreferenced block is evicted first; among equals, the block with the longest prefix."""

from __future__ import annotations

from ..table import Ids
from .run_queue import QueuedPolicy


class LRU(QueuedPolicy):
    """Least recently used, with the tail of a request first.

    A running request reads all its blocks in every step, so the last access of a block is its last release.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="lru").pools[0].policy.__class__.__name__
        'LRU'
    """

    def released(self, ids: Ids) -> None:
        self.queues[0].push(self.pool.clock, ids[::-1])

    def next_victims(self, count: int) -> Ids:
        return self.queues[0].pop(count)
