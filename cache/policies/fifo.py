"""First in, first out, and S3-FIFO (Yang et al., SOSP 2023, "FIFO queues are all you need for cache eviction")."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ..table import Ids
from .base import EvictionPolicy
from .ghosts import Ghosts

if TYPE_CHECKING:
    from ..pool import BlockPool


class FIFO(EvictionPolicy):
    """The block filled first goes first, within a request tail first; uses do not count."""

    def bind(self, pool: BlockPool) -> None:
        """See `EvictionPolicy`."""
        super().bind(pool)
        self._waits = np.zeros(pool.num_blocks, np.bool_)
        self._passed = np.zeros(pool.num_blocks, np.bool_)
        self.clear()

    def completed(self, ids: Ids) -> None:
        """See `EvictionPolicy`."""
        self._queue.append((self.pool.clock, ids[::-1].copy()))
        self._passed[ids] = False
        self._turn[ids] = self.pool.clock

    def released(self, ids: Ids) -> None:
        """See `EvictionPolicy`."""
        self._waits[ids] = True
        overdue = ids[self._passed[ids]]
        if overdue.size:  # their turn came while they were held
            self._passed[overdue] = False
            self._turn[overdue] = self.pool.clock
            self._queue.appendleft((self.pool.clock, overdue[::-1]))

    def accessed(self, ids: Ids, hit: bool) -> None:
        """See `EvictionPolicy`."""
        self._waits[ids] = False

    def victims(self, count: int) -> Ids:
        """See `EvictionPolicy`."""
        parts = []
        while count:
            turn, ids = _next_part(self._queue, count)
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
        """See `EvictionPolicy`."""
        self._waits[ids] = False
        self._turn[ids] = -1

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._queue: deque[tuple[int, Ids]] = deque()
        self._turn = np.full(self.pool.num_blocks, -1, np.int64)
        self._waits.fill(False)
        self._passed.fill(False)


def _next_part(queue: deque[tuple[int, Ids]], count: int) -> tuple[int, Ids]:
    """The front of the oldest run: taking a few blocks must not cost a look at all of a long one."""
    turn, ids = queue.popleft()
    width = 2 * count + 64
    if ids.size > width:
        queue.appendleft((turn, ids[width:]))
    return turn, ids[:width]


class S3FIFO(EvictionPolicy):
    """A small queue for newcomers, a main queue for those used again, ghosts of newcomers that were not."""

    def bind(self, pool: BlockPool) -> None:
        """See `EvictionPolicy`."""
        super().bind(pool)
        self._uses = np.zeros(pool.num_blocks, np.int8)
        self._waits = np.zeros(pool.num_blocks, np.bool_)
        self._ghosts = Ghosts(2 * pool.num_blocks)
        self.clear()

    def accessed(self, ids: Ids, hit: bool) -> None:
        """See `EvictionPolicy`."""
        self._waits[ids] = False
        if hit:
            self._uses[ids] = np.minimum(self._uses.take(ids) + 1, 3)

    def completed(self, ids: Ids) -> None:
        """See `EvictionPolicy`."""
        back = self._ghosts.recall(self.pool.keys_of(ids)) >= 0
        self._uses[ids] = 0
        self._push(0, ids[~back][::-1])
        self._push(1, ids[back][::-1])

    def released(self, ids: Ids) -> None:
        """See `EvictionPolicy`."""
        self._waits[ids] = True
        self._push(1, ids[self._turn.take(ids) < 0][::-1])  # their turn came while they were held

    def _push(self, queue: int, ids: Ids) -> None:
        if ids.size:
            self._turns += 1
            self._turn[ids] = self._turns
            self._queues[queue].append((self._turns, ids))
            self._sizes[queue] += ids.size

    def victims(self, count: int) -> Ids:
        """See `EvictionPolicy`."""
        parts = []
        while count:
            small = bool(self._queues[0]) and (10 * self._sizes[0] > self.pool.num_blocks or not self._queues[1])
            queue = 0 if small else 1
            turn, ids = _next_part(self._queues[queue], count)
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
        """See `EvictionPolicy`."""
        self._turn[ids] = -1
        self._waits[ids] = False

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._queues: tuple[deque[tuple[int, Ids]], deque[tuple[int, Ids]]] = (deque(), deque())
        self._sizes = [0, 0]
        self._turn = np.full(self.pool.num_blocks, -1, np.int64)
        self._turns = 0
        self._uses.fill(0)
        self._waits.fill(False)
        self._ghosts.clear()
