"""The block that fewest requests have used goes first; among equals the one used longest ago, tail first."""

from __future__ import annotations

import numpy as np

from ..policies import EvictionPolicy, PoolView, RunQueue, compact_together, too_few
from ..table import Ids

MOST = 63
"""Counts above it are equal."""


class LFU(EvictionPolicy):
    """Least frequently used. A block's count begins anew when it has been evicted.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "lfu", capacity=3).hit_rate, 2)
        0.5
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._ticket_of = np.full(pool.num_blocks, -1, np.int64)
        self._queues = [RunQueue(self._ticket_of) for _ in range(MOST + 1)]

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            self._ticket_of[ids] = -1

    def released(self, ids: Ids) -> None:
        ids = ids[::-1]
        counts = np.minimum(self.pool.access_count.take(ids), MOST)
        for count in np.unique(counts).tolist():
            self._queues[count].push((MOST + 1) * self.pool.clock + count, ids[counts == count])
        compact_together(self._queues, self.pool.num_blocks)

    def victims(self, count: int) -> Ids:
        parts = []
        for queue in self._queues:
            while count and queue.head() is not None:
                parts.append(queue.pop(count))
                count -= parts[-1].size
        if count:
            raise too_few(count)
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        self._ticket_of[ids] = -1

    def clear(self) -> None:
        self._ticket_of.fill(-1)
        for queue in self._queues:
            queue.clear()
