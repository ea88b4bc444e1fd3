"""The choice of victims: blocks are evicted from the end of the run whose last block has the lowest score.

A run is the part of a request's blocks that no later request has used. Eviction shortens a run from its end and stops
where the score changes. A block is evicted before its parent, because it cannot be hit without the parent. To save
time, a heap keeps the runs with the lowest scores, and serves several requests before the next ranking. For a single
element, such as a block's owner, the code uses a memoryview of the array, which is faster.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

import numpy as np

from ...table import Ids, count_nonzero, view
from .model import HazardModel
from .runs import NO_BLOCKS, Numbers, RunTable

Part = tuple[Ids, int, bool]  # a request's evicted blocks, its serial, and whether the first of them was its last block

FRESH = 32  # a ranking of n runs serves n // 32 requests, because its time grows with n
# Bounds for the number of requests that scores serve. A cache of few runs ranks for every request: the last request's
# blocks may have the lowest scores, and evicting them at once keeps other conversations whole.
LEAST, LONGEST = 1, 64
SPARE = 64  # number of runs to rank in addition to one run for each block to evict
LOOK = 64  # minimum number of places checked together
FINISHED_SCORE = -1.0  # score of blocks of a finished conversation


class VictimChooser:
    """A chooser of victims, which evicts from the ends of runs.

    `child_count` has for each block the number of its children, which are runs that start after it.

    `owner` has for each block the serial of the request that used it last. Its low `place_bits` bits are the place of
    the block in that request's chain. It is -1 if the block has no owner. Eviction sets it to -1.
    """

    def __init__(
        self, runs: RunTable, model: HazardModel, owner: Numbers, child_count: Numbers, place_bits: int
    ) -> None:
        self._runs = runs
        self._model = model
        self._owner, self._owner_of = owner, view(owner)
        self._child_count, self._child_count_of = child_count, view(child_count)
        self._place_bits = place_bits
        self._parts: list[Part] = []
        self._heap: list[tuple[float, int]] = []
        self.until = 0  # number of requests from which on scores must be computed again

    @property
    def nbytes(self) -> int:
        """Bytes held between choices."""
        return 100 * len(self._heap)

    def reparent(self, rows: list[int]) -> None:
        """Update the parents and child counts of these rows, whose runs have a new start or are empty.

        This may shorten the rows' `chains` to the blocks of their runs.
        """
        runs, child_count = self._runs, self._child_count_of
        views, chains = runs.views, runs.chains
        start_of, end_of, parent_of, places = views.start, views.end, views.parent, 0
        for row in rows:
            before = parent_of[row]
            if before >= 0:
                child_count[before] -= 1
            if start_of[row] < end_of[row]:
                parent_of[row] = parent = runs.block(row, start_of[row] - 1)
                child_count[parent] += 1
                runs.trim(row)
            else:
                parent_of[row] = -1
                places += len(chains[row]) // 4
                chains[row] = NO_BLOCKS
        runs.places -= places

    def pop_evicted(self) -> list[Part]:
        """Return the blocks that were evicted since the last call, and forget them."""
        parts, self._parts = self._parts, []
        return parts

    def rank(self, count: int, now: int, learned: bool) -> None:
        """Score every run whose last block has no child, and keep the runs with the least scores.

        The kept runs suffice if each request until the next ranking needs `count` blocks. If `learned` is false, keep
        only runs with blocks of finished conversations. `evict_oldest` then chooses the other victims.
        """
        runs = self._runs
        rows = runs.nonempty()
        self.until = now + max(LEAST, min(LONGEST, rows.size // FRESH))
        rows = rows[self._child_count.take(runs.last.take(rows)) == 0]
        over = runs.final.take(rows) & (runs.end.take(rows) > runs.shared.take(rows))
        if not learned:
            self._heap = [(FINISHED_SCORE, row) for row in rows[over].tolist()]
            return
        scores = self._model.scores(runs.stratum.take(rows), runs.covariates.take(rows), now - runs.serial.take(rows))
        scores[over] = FINISHED_SCORE
        most = SPARE + count * (self.until - now)
        if rows.size > most:
            least = scores.argpartition(most)[:most]
            rows, scores = rows[least], scores[least]
        self._heap = list(zip(scores.tolist(), rows.tolist(), strict=True))
        heapify(self._heap)

    def drop_ranks(self) -> None:
        """Forget the ranks, because rows have new numbers."""
        self._heap, self.until = [], 0

    def evict_least(self, count: int, now: int, below: float = math.inf) -> int:
        """Evict up to `count` blocks with the least scores below a bound; return how many."""
        heap = self._heap
        left = count
        while left and heap and heap[0][0] < below:
            row = heappop(heap)[1]
            if not self._evictable(row):
                continue
            evicted, parent = self._evict_from(row, left, by_score=True)
            left -= evicted
            for other in (row, parent):
                if other >= 0 and self._evictable(other):
                    heappush(heap, (self._score(other, now), other))
        return count - left

    def _evictable(self, row: int) -> bool:
        """Return whether a run has blocks left and its last block has no child."""
        views = self._runs.views
        return bool(views.start[row] < views.end[row] and not self._child_count_of[views.last[row]])

    def _score(self, row: int, now: int) -> float:
        """Return the score of the last block of a run."""
        views = self._runs.views
        if views.final[row] and views.end[row] > views.shared[row]:
            return FINISHED_SCORE
        return self._model.score(views.stratum[row], views.covariates[row], now - views.serial[row])

    def evict_oldest(self, count: int) -> int:
        """Evict up to `count` blocks in lru's order; return how many."""
        left = count
        for row in self._runs.nonempty().tolist():
            while left and self._runs.start[row] < self._runs.end[row]:
                left -= self._evict_from(row, left, by_score=False)[0]
            if not left:
                break
        return count - left

    def _evict_from(self, row: int, count: int, by_score: bool) -> tuple[int, int]:
        """Evict up to `count` blocks from a run's end; return how many, and the row of the run before it or -1.

        The run before is the one that ends in the parent of this run's first block. Its row is returned if this run is
        now empty and the parent has no other child, because the run before may then be evicted.

        With `by_score`, stop where the score changes, and before blocks that have children.
        """
        runs = self._runs
        views = runs.views
        start, end, serial = views.start[row], views.end[row], views.serial[row]
        owner = serial << self._place_bits
        tail = end == views.size[row]
        if tail and by_score:  # the request's last block has its own score and no children, so it is evicted alone
            chosen, looked = runs.blocks(row, end - 1, end), 1
            if self._owner_of[views.last[row]] == owner + end - 1:
                self._owner_of[views.last[row]] = -1
            else:
                chosen = chosen[:0]
        else:
            low = max(runs.piece_start(row, start, end) if by_score else start, end - max(LOOK, 2 * count))
            ids = runs.blocks(row, low, end)[::-1]
            looked = ids.size
            mine = self._owner.take(ids) == np.arange(owner + end - 1, owner + low - 1, -1)
            if by_score:
                stops = self._child_count.take(ids) * mine
                if count_nonzero(stops):
                    looked = int(stops.nonzero()[0][0])
            if count_nonzero(mine) == ids.size:
                looked = min(looked, count)
                chosen = ids[:looked]
            else:
                places = mine[:looked].nonzero()[0][:count]
                if places.size == count:
                    looked = int(places[-1]) + 1
                chosen = ids[places]
                tail = tail and bool(places.size) and places[0] == 0
            self._owner[chosen.astype(np.intp)] = -1
        if looked:
            runs.shrink_to(row, end - looked)
        parent_row = -1
        if end - looked <= start:
            parent = views.parent[row]
            if parent >= 0:
                views.parent[row] = -1
                self._child_count_of[parent] -= 1
                if not self._child_count_of[parent] and self._owner_of[parent] >= 0:
                    parent_row = self._row_ending_in(parent)
        number = len(chosen)
        if number:
            self._parts.append((chosen, serial, bool(tail)))
        return number, parent_row

    def _row_ending_in(self, block: int) -> int:
        """Return the row whose last block this is, or -1."""
        runs, owner = self._runs, self._owner_of[block]
        known, rows = runs.find(np.array([owner >> self._place_bits]))
        if not known.size:
            return -1  # the owner was released after the last update of `runs` and has no row yet
        row, place = rows.item(0), owner & ((1 << self._place_bits) - 1)
        return row if runs.views.end[row] - 1 == place else -1
