"""Hints of the caller first: blocks of the lowest priority go first, among equals the one used longest ago."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import numpy as np

from ..table import Ids
from .base import EvictionPolicy, PoolView
from .run_queue import RunQueue, too_few

GONE = -(1 << 31)
"""Priority of blocks of a conversation that is over."""


class Priority(EvictionPolicy):
    """Heeds `allocate(..., priority=, ttl=)`; without hints it is lru.

    A block keeps the highest priority that a running hint gives it. When `ttl` seconds have passed since the hint, the
    block has priority 0 again. Of a conversation that `free(..., returns=0)` says is over, blocks without priority that
    only its last request used go first of all. Nothing is pinned: when only blocks of high priority are left, they go.

    Args:
        now: The clock, in seconds.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=2, block_size=4, policy="priority")
        >>> for request, priority in (("a", 1), ("b", 0), ("c", 0)):  # the third needs a block of another
        ...     prompt = [ord(request)] * 4
        ...     allocation = manager.allocate(request, prompt, priority=priority, ttl=60)
        ...     merged = manager.commit(request, 4)
        ...     manager.free(request)
        >>> [manager.allocate(name, [ord(name)] * 4 + [0]).num_cached_tokens for name in "a"]
        [4]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._priority = np.zeros(pool.num_blocks, np.int32)
        self._until = np.zeros(pool.num_blocks)
        self._ticket_of = np.full(pool.num_blocks, -1, np.int64)
        self._queues: dict[int, RunQueue] = {}
        self._order: list[int] = []  # heap of the priorities that have a queue
        self._places = 0  # of all queues, at most
        self._over = RunQueue(self._ticket_of)
        self._ends: list[tuple[float, int, Ids]] = []
        self._end_places = 0
        self._tickets = 0
        self._gone = False

    @property
    def nbytes(self) -> int:
        """Bytes of arrays, queues and hints that run out."""
        return super().nbytes + 4 * (self._places + self._end_places) + 500 * len(self._queues) + 200 * len(self._ends)

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            self._ticket_of[ids] = -1
            back = ids[self._priority.take(ids) == GONE]
            if back.size:
                self._priority[back] = 0
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
            self._end_places += ids.size
            if self._end_places > 2 * self.pool.num_blocks + 64:
                self._drop_old_ends()

    def _drop_old_ends(self) -> None:
        """Forgets ends that a later hint has moved; each block has one at most then."""
        ends = [(until, ticket, ids[self._until[ids] == until]) for until, ticket, ids in self._ends]
        self._ends = [end for end in ends if end[2].size]
        heapq.heapify(self._ends)
        self._end_places = sum(ids.size for _, _, ids in self._ends)

    def _next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def returning(self, probability: float) -> None:
        self._gone = probability == 0

    def released(self, ids: Ids) -> None:
        if self._gone:  # what no other request has used goes first
            own = ids[(self.pool.access_count.take(ids) == 1) & (self._priority.take(ids) <= 0)]
            self._priority[own] = GONE
            self._until[own] = np.inf
            self._gone = False
        self._enqueue(ids[::-1])

    def _enqueue(self, ids: Ids) -> None:
        self._priority[ids[self._until[ids] <= self._now()]] = 0
        priorities = self._priority[ids]
        for priority in np.unique(priorities).tolist():
            queue = self._queues.get(priority)
            if queue is None:
                queue = self._queues[priority] = RunQueue(self._ticket_of)
                heapq.heappush(self._order, priority)
            queue.push(self._next_ticket(), ids[priorities == priority])
        self._places += ids.size
        if self._places > 2 * self.pool.num_blocks + 64:
            self._compact()

    def _compact(self) -> None:
        for queue in (*self._queues.values(), self._over):
            queue.compact()
        self._queues = {priority: queue for priority, queue in self._queues.items() if queue.nbytes}
        self._order = sorted(self._queues)
        self._places = sum(queue.nbytes for queue in (*self._queues.values(), self._over)) // 4

    def _expire(self) -> None:
        now = self._now()
        while self._ends and self._ends[0][0] <= now:
            until, _, ids = heapq.heappop(self._ends)
            self._end_places -= ids.size
            ids = ids[(self._until[ids] == until) & (self._priority[ids] != 0)]
            self._priority[ids] = 0
            waiting = ids[self._ticket_of[ids] >= 0]
            if waiting.size:
                order = np.lexsort((-self.pool.prefix_length[waiting], self.pool.last_access[waiting]))
                self._over.push(self._next_ticket(), waiting[order])
                self._places += waiting.size

    def _oldest(self) -> RunQueue:
        """The queue whose head goes next: priority 0 with what has fallen back to it, then the higher ones."""
        over = self._over.first()
        while self._order:
            priority = self._order[0]
            queue = self._queues[priority]
            block = queue.first()
            if block is None:
                heapq.heappop(self._order)
                del self._queues[priority]
                continue
            if over is None or priority < 0:
                return queue
            age = self.pool.last_access
            return self._over if priority > 0 or age[over] < age[block] else queue
        return self._over

    def victims(self, count: int) -> Ids:
        self._expire()
        parts = []
        while count:
            parts.append(self._oldest().pop(count))
            if not parts[-1].size:
                raise too_few(count)
            count -= parts[-1].size
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        self._ticket_of[ids] = -1

    def clear(self) -> None:
        self._ticket_of.fill(-1)
        self._queues.clear()
        self._order.clear()
        self._over.clear()
        self._ends.clear()
        self._places = self._end_places = 0
        self._gone = False
        self._priority.fill(0)
        self._until.fill(0)
