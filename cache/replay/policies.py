"""Policies for comparison: published policies, and two that know future requests."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..policies import EvictionPolicy, Ghosts, PoolView, QueuedPolicy, compact_together
from ..table import Ids
from .traces import NEVER, BlockIds, digests_of

NO_BLOCKS = np.empty(0, np.int32)
MOST = 63  # `LFU` counts up to this number of uses


class LFU(QueuedPolicy):
    """Least frequently used: the block that the fewest requests used is evicted first.

    Among equals, it is the least recently used one. A block's count starts again after its eviction.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="lfu").pools[0].policy.__class__.__name__
        'LFU'
    """

    num_queues = MOST + 1

    def released(self, ids: Ids) -> None:
        ids = ids[::-1]
        counts = np.minimum(self.pool.access_count.take(ids), MOST)
        for count in np.unique(counts).tolist():
            self.queues[count].push((MOST + 1) * self.pool.clock + count, ids[counts == count])
        compact_together(self.queues, self.pool.num_blocks)

    def next_victims(self, count: int) -> Ids:
        return next((queue for queue in self.queues if queue.head() is not None), self.queues[0]).pop(count)


class FIFO(EvictionPolicy):
    """First in, first out: the block that was filled first is evicted first, and within a request the tail first.

    Uses make no difference.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="fifo").pools[0].policy.__class__.__name__
        'FIFO'
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._waits = np.zeros(pool.num_blocks, np.bool_)  # whether no request holds the block
        self._passed = np.zeros(pool.num_blocks, np.bool_)  # whether a request held the block in its turn
        self.clear()

    def completed(self, ids: Ids) -> None:
        self._queue.append((self.pool.clock, ids[::-1].copy()))
        self._passed[ids] = False
        self._turn[ids] = self.pool.clock

    def released(self, ids: Ids) -> None:
        self._waits[ids] = True
        overdue = ids[self._passed[ids]]
        if overdue.size:  # requests held them when it was their turn to be evicted
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
        self._turn = np.full(self.pool.num_blocks, -1, np.int64)  # the queue's entry with the block, or -1
        self._waits.fill(False)
        self._passed.fill(False)


def next_part(queue: deque[tuple[int, Ids]], count: int) -> tuple[int, Ids]:
    """Remove and return the front of the oldest run, so that a few victims do not cost a scan of a long run."""
    turn, ids = queue.popleft()
    width = 2 * count + 64
    if ids.size > width:
        queue.appendleft((turn, ids[width:]))
    return turn, ids[:width]


class S3FIFO(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023).

    It has a small queue for new blocks, a main queue for blocks that were used again, and ghosts of new blocks that
    were not.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="s3fifo").pools[0].policy.__class__.__name__
        'S3FIFO'
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._uses = np.zeros(pool.num_blocks, np.int8)  # hits since the block was filled, at most 3
        self._waits = np.zeros(pool.num_blocks, np.bool_)  # whether no request holds the block
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
        self._push(1, ids[self._turn.take(ids) < 0][::-1])  # requests held them in their turn

    def _push(self, queue: int, ids: Ids) -> None:
        """Append blocks to the small queue (0) or the main queue (1)."""
        if ids.size:
            self._turns += 1
            self._turn[ids] = self._turns
            self.queues[queue].append((self._turns, ids))
            self._sizes[queue] += ids.size

    def victims(self, count: int) -> Ids:
        parts = []
        while count:
            # The small queue may keep a tenth of the blocks.
            small = bool(self.queues[0]) and (10 * self._sizes[0] > self.pool.num_blocks or not self.queues[1])
            queue = 0 if small else 1
            turn, ids = next_part(self.queues[queue], count)
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
                self.queues[queue].appendleft((turn, gone[count:]))
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
        self.queues: tuple[deque[tuple[int, Ids]], deque[tuple[int, Ids]]] = (deque(), deque())
        self._sizes = [0, 0]
        self._turn = np.full(self.pool.num_blocks, -1, np.int64)  # the entry of a queue with the block, or -1
        self._turns = 0
        self._uses.fill(0)
        self._waits.fill(False)
        self._ghosts.clear()


class ARC(QueuedPolicy):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003).

    It has a queue of blocks used once and a queue of blocks used again, each in order of last use. If a ghost of one
    queue comes back, that queue gets more room.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="arc").pools[0].policy.__class__.__name__
        'ARC'
    """

    num_queues = 2

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._again = np.zeros(pool.num_blocks, np.bool_)  # whether the block was used again
        self._ghosts = Ghosts(2 * pool.num_blocks)
        self._waiting = [0, 0]  # released blocks in each queue
        self._target = 0.0  # number of blocks used once that may stay

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            self.removed(ids)
            self._again[ids] = True

    def removed(self, ids: Ids) -> None:
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
                self.queues[n].push(2 * self.pool.clock + n, mine)
                self._waiting[n] += mine.size
        compact_together(self.queues, self.pool.num_blocks)

    def next_victims(self, count: int) -> Ids:
        once, again = self._waiting
        excess = once - int(self._target)
        n = 0 if once and (excess > 0 or not again) else 1
        part = self.queues[n].pop(min(count, max(excess, 1)) if n == 0 and again else count)
        self._waiting[n] -= part.size
        self._ghosts.remember(self.pool.keys_of(part), np.full(part.size, n, np.int32))
        return part

    def clear(self) -> None:
        super().clear()
        self._ghosts.clear()
        self._waiting = [0, 0]
        self._target = 0.0


class Belady(EvictionPolicy):
    """The optimum, which knows the future, for replays only.

    It evicts the block whose next use is farthest ahead, and among equals the block with the longest prefix.

    Args:
        requests: Block ids of all requests to come, in order.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "belady", capacity=3).hit_rate, 2)
        0.5
    """

    def __init__(self, requests: Sequence[BlockIds]) -> None:
        self._uses: dict[int, deque[int]] = {}
        for number, ids in enumerate(requests):
            for key in digests_of(ids)[:, 0].tolist():
                self._uses.setdefault(key, deque()).append(number)
        self._now = 0

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._heap: list[tuple[int, int, int]] = []
        self._entry: dict[int, tuple[int, int, int]] = {}  # by block; other entries in the heap are outdated

    def accessed(self, ids: Ids, hit: bool) -> None:
        self.removed(ids)

    def finished(self, output_tokens: int) -> None:
        self._now += 1

    def released(self, ids: Ids) -> None:
        lengths: Any = self.pool.prefix_length[ids].tolist()
        for block, key, length in zip(ids.tolist(), self.pool.keys_of(ids).tolist(), lengths, strict=True):
            self._enter(self._next_use(key), length, block)

    def _next_use(self, key: int) -> int:
        """Return the number of the next request that uses a block with this key."""
        uses = self._uses[key]
        while uses and uses[0] < self._now:
            uses.popleft()
        return uses[0] if uses else NEVER

    def _enter(self, next_use: int, length: int, block: int) -> None:
        self._entry[block] = entry = (-next_use, -length, block)
        heapq.heappush(self._heap, entry)

    def victims(self, count: int) -> Ids:
        chosen: list[int] = []
        while len(chosen) < count:
            entry = heapq.heappop(self._heap)
            if self._entry.get(entry[2]) == entry:
                del self._entry[entry[2]]
                chosen.append(entry[2])
        return np.array(chosen, np.int32)

    def removed(self, ids: Ids) -> None:
        for block in ids.tolist():
            self._entry.pop(block, None)

    def clear(self) -> None:
        self._heap.clear()
        self._entry.clear()


class NextTurn(Belady):
    """A policy that knows when each conversation resumes, but not which blocks it will use. For replays only.

    It is like `Belady`, but ranks a block by the next turn of a conversation that used it, the soonest if there are
    several. If that turn does not use the block, the next known turn counts.

    Args:
        turns: For each request, the number of the request that continues it, from `next_turns`.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "next_turn", capacity=3).hit_rate, 2)
        0.5
    """

    def __init__(self, turns: Sequence[int]) -> None:
        super().__init__(())
        self._turns = turns
        self._ahead: dict[int, list[int]] = {}  # by key, turns to come of requests that used the block
        self._due: dict[int, Ids] = {}  # by turn, blocks that wait for it

    def finished(self, output_tokens: int) -> None:
        ids = self._due.pop(self._now, NO_BLOCKS)
        for block, key in zip(ids.tolist(), self.pool.keys_of(ids).tolist(), strict=True):
            if self._entry.get(block, (NEVER,))[0] == -self._now:
                later = [turn for turn in self._ahead[key] if turn > self._now]
                self._enter(min(later, default=NEVER), self.pool.prefix_length.item(block), block)
        super().finished(output_tokens)

    def released(self, ids: Ids) -> None:
        super().released(ids)
        turn = self._turns[self._now - 1]
        self._due[turn] = np.append(self._due.get(turn, NO_BLOCKS), ids)

    def _next_use(self, key: int) -> int:
        ahead = [turn for turn in self._ahead.get(key, ()) if turn >= self._now]
        self._ahead[key] = [*ahead, self._turns[self._now - 1]]
        return min(self._ahead[key])
