"""Adaptive replacement cache (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

import numpy as np

from ..policies import EvictionPolicy, Ghosts, PoolView, RunQueue, compact_together, too_few
from ..table import Ids


class ARC(EvictionPolicy):
    """Blocks used once and blocks used again, each in order of last use; ghosts of both move the border between.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "arc", capacity=3).hit_rate, 2)
        0.5
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._again = np.zeros(pool.num_blocks, np.bool_)
        self._ticket_of = np.full(pool.num_blocks, -1, np.int64)
        self._queues = (RunQueue(self._ticket_of), RunQueue(self._ticket_of))
        self._ghosts = Ghosts(2 * pool.num_blocks)
        self._waiting = [0, 0]
        self._target = 0.0
        """Blocks used once that may stay."""

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            self._forget(ids)
            self._again[ids] = True

    def _forget(self, ids: Ids) -> None:
        waiting = ids[self._ticket_of.take(ids) >= 0]
        again = int(np.count_nonzero(self._again.take(waiting)))
        self._waiting[0] -= waiting.size - again
        self._waiting[1] -= again
        self._ticket_of[waiting] = -1

    def completed(self, ids: Ids) -> None:
        ghost = self._ghosts.recall(self.pool.keys_of(ids))
        once, again = int(np.count_nonzero(ghost == 0)), int(np.count_nonzero(ghost == 1))
        self._target = min(max(self._target + once - again, 0.0), float(self.pool.num_blocks))
        self._again[ids] = ghost >= 0

    def released(self, ids: Ids) -> None:
        ids = ids[::-1]
        again = self._again.take(ids)
        for n, mine in enumerate((ids[~again], ids[again])):
            if mine.size:
                self._queues[n].push(2 * self.pool.clock + n, mine)
                self._waiting[n] += mine.size
        compact_together(self._queues, self.pool.num_blocks)

    def victims(self, count: int) -> Ids:
        parts = []
        while count:
            once, again = self._waiting
            excess = once - int(self._target)
            n = 0 if once and (excess > 0 or not again) else 1
            part = self._queues[n].pop(min(count, max(excess, 1)) if n == 0 and again else count)
            if not part.size:
                raise too_few(count)
            self._waiting[n] -= part.size
            self._ghosts.remember(self.pool.keys_of(part), np.full(part.size, n, np.int32))
            parts.append(part)
            count -= part.size
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        self._forget(ids)

    def clear(self) -> None:
        self._ticket_of.fill(-1)
        for queue in self._queues:
            queue.clear()
        self._ghosts.clear()
        self._waiting = [0, 0]
        self._target = 0.0
