"""The block that fewest requests have used goes first; among equals the one used longest ago, tail first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..table import Ids
from .base import EvictionPolicy, RunQueue, compact_together

if TYPE_CHECKING:
    from ..pool import BlockPool

MOST = 63
"""Counts above it are equal."""


class LFU(EvictionPolicy):
    """Least frequently used. A block's count begins anew when it has been evicted."""

    def bind(self, pool: BlockPool) -> None:
        """See `EvictionPolicy`."""
        super().bind(pool)
        self._ticket_of = np.full(pool.num_blocks, -1, np.int64)
        self._queues = [RunQueue(self._ticket_of) for _ in range(MOST + 1)]

    def accessed(self, ids: Ids, hit: bool) -> None:
        """See `EvictionPolicy`."""
        if hit:
            self._ticket_of[ids] = -1

    def released(self, ids: Ids) -> None:
        """See `EvictionPolicy`."""
        ids = ids[::-1]
        counts = np.minimum(self.pool.access_count.take(ids), MOST)
        for count in np.unique(counts).tolist():
            self._queues[count].push((MOST + 1) * self.pool.clock + count, ids[counts == count])
        compact_together(self._queues, self.pool.num_blocks)

    def victims(self, count: int) -> Ids:
        """See `EvictionPolicy`."""
        parts = []
        for queue in self._queues:
            while count and queue.head() is not None:
                parts.append(queue.pop(count))
                count -= parts[-1].size
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        """See `EvictionPolicy`."""
        self._ticket_of[ids] = -1

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._ticket_of.fill(-1)
        for queue in self._queues:
            queue.clear()
