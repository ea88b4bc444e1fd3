"""Hints of the caller first: blocks of the lowest priority go first, among equals the one used longest ago."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import numpy as np

from ..table import Ids
from .base import EvictionPolicy, PoolView
from .run_queue import RunQueue, compact_together


class Priority(EvictionPolicy):
    """Heeds `allocate(..., priority=, ttl=)`; without hints it is lru.

    A block keeps the highest priority that a running hint gives it. When `ttl` seconds have passed since the hint, the
    block has priority 0 again. Nothing is pinned: when only blocks of high priority are left, they go.

    Args:
        now: The clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._priority = np.zeros(pool.num_blocks, np.int32)
        self._until = np.zeros(pool.num_blocks)
        self._ticket_of = np.full(pool.num_blocks, -1, np.int64)
        self._queues: dict[int, RunQueue] = {}
        self._over = RunQueue(self._ticket_of)
        self._ends: list[tuple[float, int, Ids]] = []
        self._tickets = 0

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            self._ticket_of[ids] = -1
        else:
            self._priority[ids] = 0

    def hinted(self, ids: Ids, priority: int, ttl: float | None) -> None:
        now = self._now()
        until = float("inf") if ttl is None else now + ttl
        old = np.where(self._until[ids] > now, self._priority[ids], 0)
        ids = ids[(priority > old) | ((priority == old) & (until > self._until[ids]))]
        self._priority[ids] = priority
        self._until[ids] = until
        if ttl is not None and ids.size:
            heapq.heappush(self._ends, (until, self._next_ticket(), ids))

    def _next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def released(self, ids: Ids) -> None:
        self._enqueue(ids[::-1])

    def _enqueue(self, ids: Ids) -> None:
        self._priority[ids[self._until[ids] <= self._now()]] = 0
        priorities = self._priority[ids]
        for priority in np.unique(priorities).tolist():
            queue = self._queues.setdefault(priority, RunQueue(self._ticket_of))
            queue.push(self._next_ticket(), ids[priorities == priority])
        compact_together([*self._queues.values(), self._over], self.pool.num_blocks)

    def _expire(self) -> None:
        now = self._now()
        while self._ends and self._ends[0][0] <= now:
            until, _, ids = heapq.heappop(self._ends)
            ids = ids[(self._until[ids] == until) & (self._priority[ids] != 0)]
            self._priority[ids] = 0
            waiting = ids[self._ticket_of[ids] >= 0]
            if waiting.size:
                order = np.lexsort((-self.pool.prefix_length[waiting], self.pool.last_access[waiting]))
                self._over.push(self._next_ticket(), waiting[order])

    def _oldest(self) -> RunQueue | None:
        """The queue whose head goes next: priority 0 with what has fallen back to it, then the higher ones."""
        heads = [(q.first(), q) for p, q in sorted(self._queues.items()) if p > 0]
        low = [(q.first(), q) for p, q in sorted(self._queues.items()) if p <= 0]
        over = self._over.first()
        for block, queue in low:
            if block is not None:
                age = self.pool.last_access
                return self._over if over is not None and age[over] < age[block] else queue
        if over is not None:
            return self._over
        return next((queue for block, queue in heads if block is not None), None)

    def victims(self, count: int) -> Ids:
        self._expire()
        parts = []
        while count and (queue := self._oldest()) is not None:
            parts.append(queue.pop(count))
            count -= parts[-1].size
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        self._ticket_of[ids] = -1

    def clear(self) -> None:
        self._ticket_of.fill(-1)
        self._queues.clear()
        self._over.clear()
        self._ends.clear()
        self._priority.fill(0)
        self._until.fill(0)
