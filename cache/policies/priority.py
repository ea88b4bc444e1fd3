"""A policy that evicts blocks of the lowest priority first, and of equal priority the least recently used."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

import numpy as np

from ..table import Ids
from .base import PoolView
from .run_queue import QueuedPolicy, RunQueue

GONE = -(1 << 31)  # priority of blocks of a finished conversation


class Priority(QueuedPolicy):
    """A policy that uses `allocate(..., priority=, ttl=)`. Without hints it is lru.

    Of several hints for a block, the one with the highest priority counts, and of equal priorities the one that ends
    last. When its `ttl` seconds are over, the block's priority is 0, even if a hint of lower priority has not expired.
    If `free(..., returns=0)` says that a conversation is over, blocks without priority that only its last request used
    are evicted first of all. Nothing is pinned: if only blocks of high priority are left, they are evicted.

    Args:
        now: Returns the time in seconds.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=2, block_size=4, policy="priority")
        >>> for request, priority in (("a", 1), ("b", 0), ("c", 0)):  # the third evicts a block of another request
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
        self._expired = self.queues[0]
        self._tickets = itertools.count(1)
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._by_priority: dict[int, RunQueue] = {}
        self._order: list[int] = []  # heap of the priorities that have a queue
        self._ends: list[tuple[float, int, Ids]] = []  # heap of hints that expire: time, ticket, blocks
        self._places = self._end_places = 0  # upper bounds of the places in all queues, and in `_ends`
        self._over = self._gone = False  # the ending request will not return; neither will the next released blocks
        self._priority.fill(0)
        self._until.fill(0)

    @property
    def nbytes(self) -> int:
        """Bytes of arrays, queues and hints that expire."""
        hints = 500 * len(self._by_priority) + 200 * len(self._ends)
        return super().nbytes + 4 * (self._places + self._end_places) + hints

    def accessed(self, ids: Ids, hit: bool) -> None:
        super().accessed(ids, hit)
        self._priority[ids[self._priority.take(ids) == GONE] if hit else ids] = 0

    def hinted(self, ids: Ids, priority: int, ttl: float | None) -> None:
        now = self._now()
        until = float("inf") if ttl is None else now + ttl
        old = np.where(self._until[ids] > now, self._priority[ids], 0)
        ids = ids[(priority > old) | ((priority == old) & (until > self._until[ids]))]
        self._priority[ids] = priority
        self._until[ids] = until
        if ttl is not None and ids.size:
            heapq.heappush(self._ends, (until, next(self._tickets), ids))
            self._end_places += ids.size
            if self._end_places > 2 * self.pool.num_blocks + 64:  # forget entries that a later hint has replaced
                ends = [(until, ticket, ids[self._until[ids] == until]) for until, ticket, ids in self._ends]
                self._ends = [end for end in ends if end[2].size]
                heapq.heapify(self._ends)
                self._end_places = sum(ids.size for _, _, ids in self._ends)

    def returning(self, probability: float) -> None:
        self._over = probability == 0

    def finished(self, output_tokens: int) -> None:
        self._gone, self._over = self._over, False

    def released(self, ids: Ids) -> None:
        if self._gone:  # blocks that no other request used are evicted first
            own = ids[(self.pool.access_count.take(ids) == 1) & (self._priority.take(ids) <= 0)]
            self._priority[own] = GONE
            self._until[own] = np.inf
            self._gone = False
        self._enqueue(ids[::-1])

    def _enqueue(self, ids: Ids) -> None:
        """Add released blocks to the queues of their priorities, which are 0 where a hint has expired."""
        self._priority[ids[self._until[ids] <= self._now()]] = 0
        priorities = self._priority[ids]
        for priority in np.unique(priorities).tolist():
            queue = self._by_priority.get(priority)
            if queue is None:
                queue = self._by_priority[priority] = RunQueue(self._ticket_of)
                heapq.heappush(self._order, priority)
            queue.push(next(self._tickets), ids[priorities == priority])
        self._places += ids.size
        if self._places > 2 * self.pool.num_blocks + 64:
            for queue in (*self._by_priority.values(), self._expired):
                queue.compact()
            self._by_priority = {priority: queue for priority, queue in self._by_priority.items() if queue.nbytes}
            self._order = sorted(self._by_priority)
            self._places = sum(queue.nbytes for queue in (*self._by_priority.values(), self._expired)) // 4

    def _expire(self) -> None:
        """Move blocks whose hints have expired to the queue of expired hints."""
        now = self._now()
        while self._ends and self._ends[0][0] <= now:
            until, _, ids = heapq.heappop(self._ends)
            self._end_places -= ids.size
            ids = ids[(self._until[ids] == until) & (self._priority[ids] != 0)]
            self._priority[ids] = 0
            waiting = ids[self._ticket_of[ids] >= 0]
            if waiting.size:
                order = np.lexsort((-self.pool.prefix_length[waiting], self.pool.last_access[waiting]))
                self._expired.push(next(self._tickets), waiting[order])
                self._places += waiting.size

    def _next_queue(self) -> RunQueue:
        """Return the queue with the next victim: the lowest priority first. Expired hints count as priority 0."""
        over = self._expired.first()
        while self._order:
            priority = self._order[0]
            queue = self._by_priority[priority]
            block = queue.first()
            if block is None:
                heapq.heappop(self._order)
                del self._by_priority[priority]
                continue
            if over is None or priority < 0:
                return queue
            age = self.pool.last_access
            return self._expired if priority > 0 or age[over] < age[block] else queue
        return self._expired

    def next_victims(self, count: int) -> Ids:
        return self._next_queue().pop(count)

    def victims(self, count: int) -> Ids:
        self._expire()
        return super().victims(count)
