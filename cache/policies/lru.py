"""The RFC's rule: of the blocks nobody holds the one accessed longest ago, among equals the longest prefix."""

from __future__ import annotations

import numpy as np

from ..table import Ids
from .base import EvictionPolicy, PoolView
from .run_queue import RunQueue, too_few


class LRU(EvictionPolicy):
    """Least recently used, tail first.

    A running request reads all its blocks at every step, so a block's last access is the release by its last holder.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "lru", capacity=2).hit_rate, 2)
        0.25
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._ticket_of = np.full(pool.num_blocks, -1, np.int64)
        self._queue = RunQueue(self._ticket_of)

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            self._ticket_of[ids.astype(np.intp)] = -1  # a third of the time that int32 takes

    def released(self, ids: Ids) -> None:
        self._queue.push(self.pool.clock, ids[::-1])

    def victims(self, count: int) -> Ids:
        first = self._queue.pop(count)
        if first.size == count:
            return first
        parts = [first]
        count -= first.size
        while count:
            part = self._queue.pop(count)
            if not part.size:
                raise too_few(count)
            parts.append(part)
            count -= part.size
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        self._ticket_of[ids] = -1

    def clear(self) -> None:
        self._ticket_of.fill(-1)
        self._queue.clear()
