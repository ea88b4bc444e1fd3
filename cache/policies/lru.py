"""The RFC's rule: of unreferenced blocks the one accessed longest ago, among equals the longest prefix."""

from __future__ import annotations

from ..table import Ids
from .run_queue import QueuedPolicy


class LRU(QueuedPolicy):
    """Least recently used, tail first.

    A running request reads all its blocks at every step, so a block's last access is the release by its last holder.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="lru").pools[0].policy.__class__.__name__
        'LRU'
    """

    def released(self, ids: Ids) -> None:
        self.queues[0].push(self.pool.clock, ids[::-1])

    def next_victims(self, count: int) -> Ids:
        return self.queues[0].pop(count)
