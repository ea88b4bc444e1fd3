"""Policies for comparison: published policies, and two that know future requests."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..policies import EvictionPolicy, Ghosts, PoolView, QueuedPolicy, compact_together, too_few
from ..table import Ids
from .traces import NEVER, BlockIds, digests_of

NO_BLOCKS = np.empty(0, np.int32)


class Ranked(EvictionPolicy):
    """A policy that ranks each released block, and evicts the block with the least rank first.

    Among equals, the block with the longest prefix is evicted first. A subclass calls `rank` in `released`.
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self.clear()

    def clear(self) -> None:
        self._heap: list[tuple[int, ...]] = []
        self._entry: dict[int, tuple[int, ...]] = {}  # by block; other entries in the heap are outdated

    def rank(self, ids: Ids, *ranks: Any) -> None:
        """Rank released blocks. Each of `ranks` has a number for each block; later ones decide between equals."""
        lengths: Any = (-self.pool.prefix_length.take(ids)).tolist()
        for *rank, block in zip(*ranks, lengths, ids.tolist(), strict=True):
            self._entry[block] = entry = (*rank, block)
            heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * self.pool.num_blocks + 64:
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)

    def accessed(self, ids: Ids, hit: bool) -> None:
        self.removed(ids)

    def victims(self, count: int) -> Ids:
        chosen: list[int] = []
        while len(chosen) < count:
            if not self._heap:
                raise too_few(count - len(chosen))
            entry = heapq.heappop(self._heap)
            if self._entry.get(entry[-1]) == entry:
                del self._entry[entry[-1]]
                chosen.append(entry[-1])
        return np.array(chosen, np.int32)

    def removed(self, ids: Ids) -> None:
        for block in ids.tolist():
            self._entry.pop(block, None)

    @property
    def nbytes(self) -> int:
        return super().nbytes + 150 * len(self._heap)


class LFU(Ranked):
    """Least frequently used: the block that the fewest requests used is evicted first.

    Among equals, the least recently used block is evicted first. A block's count starts again after its eviction.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="lfu").pools[0].policy.__class__.__name__
        'LFU'
    """

    def released(self, ids: Ids) -> None:
        self.rank(ids, self.pool.access_count.take(ids).tolist(), self.pool.last_access.take(ids).tolist())


class FIFO(Ranked):
    """First in, first out: the block that was filled first is evicted first, and within a request the tail first.

    Uses make no difference.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="fifo").pools[0].policy.__class__.__name__
        'FIFO'
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._filled = np.zeros(pool.num_blocks, np.int64)  # clock

    def completed(self, ids: Ids) -> None:
        self._filled[ids] = self.pool.clock

    def released(self, ids: Ids) -> None:
        self.rank(ids, self._filled.take(ids).tolist())


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
        self._push(self.queues[0], ids[~back][::-1])
        self._push(self.queues[1], ids[back][::-1])

    def released(self, ids: Ids) -> None:
        self._waits[ids] = True
        # `victims` removed these blocks from their queue, because requests held them when it reached them.
        self._push(self.queues[1], ids[self._turn.take(ids) < 0][::-1])

    def _push(self, queue: deque[tuple[int, int]], ids: Ids) -> None:
        for block in ids.tolist():
            self._turns += 1
            self._turn[block] = self._turns
            queue.append((self._turns, block))

    def victims(self, count: int) -> Ids:
        small, main = self.queues
        chosen: list[int] = []
        new: list[int] = []  # victims from the small queue, which become ghosts
        while len(chosen) < count:
            # The small queue may keep a tenth of the blocks.
            is_new = bool(small) and (10 * len(small) > self.pool.num_blocks or not main)
            turn, block = small.popleft() if is_new else main.popleft()
            if self._turn[block] != turn:
                continue
            self._turn[block] = -1
            if not self._waits[block]:
                continue
            if self._uses[block] > is_new:
                self._uses[block] -= not is_new
                self._push(main, np.array([block]))
                continue
            self._waits[block] = False
            chosen.append(block)
            if is_new:
                new.append(block)
        self._ghosts.remember(self.pool.keys_of(np.array(new, np.int32)), np.zeros(len(new), np.int32))
        return np.array(chosen, np.int32)

    def removed(self, ids: Ids) -> None:
        self._turn[ids] = -1
        self._waits[ids] = False

    def clear(self) -> None:
        self.queues: tuple[deque[tuple[int, int]], deque[tuple[int, int]]] = (deque(), deque())  # turns and blocks
        self._turn = np.full(self.pool.num_blocks, -1, np.int64)  # the block's entry in a queue, or -1
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
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._ghosts.clear()
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


class Belady(Ranked):
    """The optimum, which knows the future, for replays only.

    It evicts the block whose next use is farthest ahead.

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

    def finished(self, output_tokens: int) -> None:
        self._now += 1

    def released(self, ids: Ids) -> None:
        self.rank(ids, [-self._next_use(key) for key in self.pool.keys_of(ids).tolist()])

    def _next_use(self, key: int) -> int:
        """Return the number of the next request that uses a block with this key."""
        uses = self._uses[key]
        while uses and uses[0] < self._now:
            uses.popleft()
        return uses[0] if uses else NEVER


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
        self._ahead: dict[int, list[int]] = {}  # by key, future turns of the conversations that used the block
        self._due: dict[int, Ids] = {}  # by turn, blocks that wait for it

    def finished(self, output_tokens: int) -> None:
        ids = self._due.pop(self._now, NO_BLOCKS)
        for block, key in zip(ids.tolist(), self.pool.keys_of(ids).tolist(), strict=True):
            if self._entry.get(block, (NEVER,))[0] == -self._now:
                later = [turn for turn in self._ahead[key] if turn > self._now]
                self.rank(np.array([block], np.int32), [-min(later, default=NEVER)])
        super().finished(output_tokens)

    def released(self, ids: Ids) -> None:
        super().released(ids)
        turn = self._turns[self._now - 1]
        self._due[turn] = np.append(self._due.get(turn, NO_BLOCKS), ids)

    def _next_use(self, key: int) -> int:
        """Record the next turn of the current conversation for this key, and return the soonest turn recorded."""
        ahead = [turn for turn in self._ahead.get(key, ()) if turn >= self._now]
        self._ahead[key] = [*ahead, self._turns[self._now - 1]]
        return min(self._ahead[key])
