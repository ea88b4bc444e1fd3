"""First in, first out."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..policies import EvictionPolicy, PoolView
from ..table import Ids


class FIFO(EvictionPolicy):
    """The block filled first goes first, within a request tail first; uses do not count.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "fifo", capacity=3).hit_rate, 2)
        0.38
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._waits = np.zeros(pool.num_blocks, np.bool_)
        self._passed = np.zeros(pool.num_blocks, np.bool_)
        self.clear()

    def completed(self, ids: Ids) -> None:
        self._queue.append((self.pool.clock, ids[::-1].copy()))
        self._passed[ids] = False
        self._turn[ids] = self.pool.clock

    def released(self, ids: Ids) -> None:
        self._waits[ids] = True
        overdue = ids[self._passed[ids]]
        if overdue.size:  # their turn came while they were held
            self._passed[overdue] = False
            self._turn[overdue] = self.pool.clock
            self._queue.appendleft((self.pool.clock, overdue[::-1]))

    def accessed(self, ids: Ids, hit: bool) -> None:
        self._waits[ids] = False

    def victims(self, count: int) -> Ids:
        parts = []
        while count:
            turn, ids = next_part(self._queue, count)
            ids = ids[self._turn.take(ids) == turn]
            free = self._waits.take(ids)
            if not free.all():
                held = ids[~free]
                self._passed[held] = True
                self._turn[held] = -1
                ids = ids[free]
            if ids.size > count:
                self._queue.appendleft((turn, ids[count:]))
                ids = ids[:count]
            self._waits[ids] = False
            self._turn[ids] = -1
            parts.append(ids)
            count -= ids.size
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        self._waits[ids] = False
        self._turn[ids] = -1

    def clear(self) -> None:
        self._queue: deque[tuple[int, Ids]] = deque()
        self._turn = np.full(self.pool.num_blocks, -1, np.int64)
        self._waits.fill(False)
        self._passed.fill(False)


def next_part(queue: deque[tuple[int, Ids]], count: int) -> tuple[int, Ids]:
    """The front of the oldest run: taking a few blocks must not cost a look at all of a long one."""
    turn, ids = queue.popleft()
    width = 2 * count + 64
    if ids.size > width:
        queue.appendleft((turn, ids[width:]))
    return turn, ids[:width]
