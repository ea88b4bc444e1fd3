"""The queue of released blocks that most policies use, and a base class for such policies."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..table import Ids, count_nonzero
from .base import EvictionPolicy, PoolView

LOOK = 64  # places checked together, so that a few victims do not cost a scan of a long run


class RunQueue:
    """Released blocks in the order in which they are evicted, stored as runs so that all work is on vectors.

    Each run has a number, its ticket, and a block is in the queue while it has the ticket of its run. A block that is
    removed only loses its ticket. Its place in the run is skipped when the run is reached. Runs are compacted when half
    of the places are empty, so every operation is O(1) a block, amortized.

    Args:
        ticket_of: For each block, the ticket of its run, or -1. The queues of a policy share the array.

    Examples:
        >>> from pc.cache.policies import RunQueue
        >>> queue = RunQueue(ticket_of=np.full(8, -1))
        >>> queue.push(0, np.array([3, 1], np.int32))
        >>> queue.push(1, np.array([5], np.int32))
        >>> queue.pop(1).tolist(), queue.first()
        ([3], 1)
    """

    def __init__(self, ticket_of: npt.NDArray[np.int64]) -> None:
        self._ticket_of = ticket_of
        self._runs: deque[tuple[int, Ids]] = deque()
        self._places = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the runs. The owner of `ticket_of` counts the bytes of the tickets."""
        return 4 * self._places

    def push(self, ticket: int, ids: Ids) -> None:
        """Append a run, whose first block is evicted first. Each ticket must be greater than the one before."""
        self._ticket_of[ids.astype(np.intp)] = ticket  # an index of intp takes a third of the time of int32
        self._runs.append((ticket, ids))
        self._places += ids.size
        if self._places > 2 * self._ticket_of.size + 64:
            self.compact()

    def head(self) -> int | None:
        """Return the ticket of the oldest run that still has a block; None if the queue is empty."""
        while self._runs:
            ticket, ids = self._runs[0]
            live = self._ticket_of.take(ids[:LOOK]) == ticket
            first = int(live.argmax())
            if live[first]:
                self._drop(first)
                return ticket
            self._drop(live.size)
        return None

    def _drop(self, count: int) -> None:
        """Remove the first places of the oldest run."""
        if count:
            ticket, ids = self._runs.popleft()
            if count < ids.size:
                self._runs.appendleft((ticket, ids[count:]))
            self._places -= count

    def first(self) -> int | None:
        """Return the block to evict next; None if the queue is empty."""
        return None if self.head() is None else int(self._runs[0][1][0])

    def pop(self, count: int) -> Ids:
        """Remove 1 to `count` blocks from the front of the queue, and return them; none if the queue is empty."""
        while self._runs:
            ticket, ids = self._runs[0]
            ids = ids[: LOOK + 4 * count]
            live = self._ticket_of.take(ids) == ticket
            if count_nonzero(live) == ids.size:
                ids = ids[:count]
                self._drop(ids.size)
            else:
                places = live.nonzero()[0][:count]
                self._drop(int(places[-1]) + 1 if places.size == count else ids.size)
                ids = ids[places]
            if ids.size:
                self._ticket_of[ids.astype(np.intp)] = -1
                return ids
        return np.empty(0, np.int32)

    def compact(self) -> None:
        """Drop the places of removed blocks."""
        runs = [(ticket, ids[self._ticket_of[ids] == ticket]) for ticket, ids in self._runs]
        self._runs = deque((ticket, ids) for ticket, ids in runs if ids.size)
        self._places = sum(ids.size for _, ids in self._runs)

    def clear(self) -> None:
        """Forget every run. The caller resets the tickets."""
        self._runs.clear()
        self._places = 0


def too_few(count: int) -> RuntimeError:
    """Return the error that `victims` raises instead of searching forever for blocks that were never released.

    Examples:
        >>> from pc.cache.policies import too_few
        >>> too_few(2)
        RuntimeError('victims: got a count 2 above the number of released blocks, needs at most that number')
    """
    return RuntimeError(f"victims: got a count {count} above the number of released blocks, needs at most that number")


def compact_together(queues: Iterable[RunQueue], num_blocks: int) -> None:
    """Compact queues that share their tickets, once all their places together exceed twice the number of blocks.

    Examples:
        >>> from pc.cache.policies import RunQueue, compact_together
        >>> tickets = np.full(8, -1)
        >>> compact_together([RunQueue(tickets), RunQueue(tickets)], num_blocks=8)
    """
    queues = list(queues)
    if sum(queue.nbytes for queue in queues) > 4 * (2 * num_blocks + 64):
        for queue in queues:
            queue.compact()


class QueuedPolicy(EvictionPolicy):
    """A policy whose released blocks wait in one of several queues that share their tickets.

    A subclass pushes the released blocks, and returns the next victims in `next_victims`.

    Attributes:
        queues: The `num_queues` queues.

    Examples:
        >>> from pc.cache.policies import QueuedPolicy
        >>> class LongRequestsFirst(QueuedPolicy):
        ...     num_queues = 2
        ...     def released(self, ids):
        ...         self.queues[len(ids) < 100].push(self.pool.clock, ids[::-1])  # the tail of a request first
        ...     def next_victims(self, count):
        ...         return self.queues[self.queues[0].head() is None].pop(count)
        >>> manager = pc.CacheManager(num_blocks=8, policy=LongRequestsFirst)
    """

    num_queues = 1

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._ticket_of = np.full(pool.num_blocks, -1, np.int64)
        self.queues = [RunQueue(self._ticket_of) for _ in range(self.num_queues)]

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            self._ticket_of[ids.astype(np.intp)] = -1  # an index of intp takes a third of the time of int32

    @abstractmethod
    def next_victims(self, count: int) -> Ids:
        """Return 1 to `count` blocks from the front of a queue; none if all queues are empty."""

    def victims(self, count: int) -> Ids:
        first = self.next_victims(count)
        if first.size == count:
            return first
        parts = [first]
        while (left := count - sum([part.size for part in parts])) and parts[-1].size:
            parts.append(self.next_victims(left))
        if left:
            raise too_few(left)
        return np.concatenate(parts)

    def removed(self, ids: Ids) -> None:
        self._ticket_of[ids] = -1

    def clear(self) -> None:
        self._ticket_of.fill(-1)
        for queue in self.queues:
            queue.clear()
