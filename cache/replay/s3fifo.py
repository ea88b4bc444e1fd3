"""S3-FIFO (Yang et al., SOSP 2023, "FIFO queues are all you need for cache eviction")."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..policies import EvictionPolicy, Ghosts, PoolView
from ..table import Ids
from .fifo import next_part


class S3FIFO(EvictionPolicy):
    """A small queue for newcomers, a main queue for those used again, ghosts of newcomers that were not.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "s3fifo", capacity=3).hit_rate, 2)
        0.38
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._uses = np.zeros(pool.num_blocks, np.int8)
        self._waits = np.zeros(pool.num_blocks, np.bool_)
        self._ghosts = Ghosts(2 * pool.num_blocks)
        self.clear()

    def accessed(self, ids: Ids, hit: bool) -> None:
        self._waits[ids] = False
        if hit:
            self._uses[ids] = np.minimum(self._uses.take(ids) + 1, 3)

    def completed(self, ids: Ids) -> None:
        back = self._ghosts.recall(self.pool.keys_of(ids)) >= 0
        self._uses[ids] = 0
        self._push(0, ids[~back][::-1])
        self._push(1, ids[back][::-1])

    def released(self, ids: Ids) -> None:
        self._waits[ids] = True
        self._push(1, ids[self._turn.take(ids) < 0][::-1])  # their turn came while they were held

    def _push(self, queue: int, ids: Ids) -> None:
        if ids.size:
            self._turns += 1
            self._turn[ids] = self._turns
            self._queues[queue].append((self._turns, ids))
            self._sizes[queue] += ids.size

    def victims(self, count: int) -> Ids:
        parts = []
        while count:
            small = bool(self._queues[0]) and (10 * self._sizes[0] > self.pool.num_blocks or not self._queues[1])
            queue = 0 if small else 1
            turn, ids = next_part(self._queues[queue], count)
            self._sizes[queue] -= ids.size
            ids = ids[self._turn.take(ids) == turn]
            free = self._waits.take(ids)
            self._turn[ids[~free]] = -1
            ids = ids[free]
            stays = self._uses.take(ids) > (1 if small else 0)
            kept, gone = ids[stays], ids[~stays]
            if not small:
                self._uses[kept] = np.maximum(self._uses.take(kept) - 1, 0)
            if gone.size > count:
                self._sizes[queue] += gone.size - count
                self._queues[queue].appendleft((turn, gone[count:]))
                gone = gone[:count]
            self._push(1, kept)
            self._turn[gone] = -1
            self._waits[gone] = False
            if small:
                self._ghosts.remember(self.pool.keys_of(gone), np.zeros(gone.size, np.int32))
            parts.append(gone)
            count -= gone.size
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        self._turn[ids] = -1
        self._waits[ids] = False

    def clear(self) -> None:
        self._queues: tuple[deque[tuple[int, Ids]], deque[tuple[int, Ids]]] = (deque(), deque())
        self._sizes = [0, 0]
        self._turn = np.full(self.pool.num_blocks, -1, np.int64)
        self._turns = 0
        self._uses.fill(0)
        self._waits.fill(False)
        self._ghosts.clear()
