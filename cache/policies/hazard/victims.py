"""Which blocks are evicted: from the end of the run whose last block is worth least, while blocks are worth the same.

A block is evicted before its parent: it cannot be hit without it. For speed alone: scores of the runs that may go next
are kept in a heap for some requests, and owners and child counts are read through memoryviews.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

import numpy as np

from ...table import Ids, count_nonzero, view
from .model import HazardModel
from .runs import NO_BLOCKS, Numbers, RunTable

Part = tuple[Ids, int, bool]  # evicted blocks of one request, its serial, and whether the first of them was its last

FRESH = 32  # runs for each request that scores are kept for: looking at all again costs in proportion to them
# Requests that scores are kept for. Where few runs fit, not beyond one: what the last request left may be worth least,
# and to keep whole conversations others have to go at once.
LEAST, LONGEST = 1, 64
SPARE = 64  # runs ranked beyond one for each block
LOOK = 64  # places looked at together at least
FINISHED_SCORE = -1.0  # score of what the caller said is over


class VictimChooser:
    """Chooses victims, and counts in `child_count` the children of each block: runs that begin behind it.

    `owner` and `place_bits` are as in `EventLog`.
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
        self._until = 0

    @property
    def nbytes(self) -> int:
        """Bytes held between choices."""
        return 100 * len(self._heap)

    def is_due(self, now: int) -> bool:
        """Whether the scores have to be made anew."""
        return now >= self._until

    def reparent(self, rows: list[int]) -> None:
        """The runs of these rows begin behind another block now, or they are over: their chains may be cut."""
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

    def taken(self) -> list[Part]:
        """The blocks evicted since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def rank(self, count: int, now: int, learned: bool) -> None:
        """Scores every run whose last block has no child, and keeps those of which `count` blocks may be taken.

        Unless the learned order is in force, only what is over is scored.
        """
        runs = self._runs
        rows = runs.nonempty()
        self._until = now + max(LEAST, min(LONGEST, rows.size // FRESH))
        rows = rows[self._child_count.take(runs.last.take(rows)) == 0]
        over = runs.final.take(rows) & (runs.end.take(rows) > runs.shared.take(rows))
        if not learned:
            self._heap = [(FINISHED_SCORE, row) for row in rows[over].tolist()]
            return
        scores = self._model.scores(runs.stratum.take(rows), runs.covariates.take(rows), now - runs.serial.take(rows))
        scores[over] = FINISHED_SCORE
        most = SPARE + count * (self._until - now)
        if rows.size > most:
            least = scores.argpartition(most)[:most]
            rows, scores = rows[least], scores[least]
        self._heap = list(zip(scores.tolist(), rows.tolist(), strict=True))
        heapify(self._heap)

    def drop_ranks(self) -> None:
        """Rows have other numbers now."""
        self._heap, self._until = [], 0

    def least(self, count: int, now: int, below: float = math.inf) -> int:
        """Takes up to `count` blocks of the least score, below a bound, out of their runs; returns how many."""
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
        views = self._runs.views
        return bool(views.start[row] < views.end[row] and not self._child_count_of[views.last[row]])

    def _score(self, row: int, now: int) -> float:
        views = self._runs.views
        if views.final[row] and views.end[row] > views.shared[row]:
            return FINISHED_SCORE
        return self._model.score(views.stratum[row], views.covariates[row], now - views.serial[row])

    def oldest(self, count: int) -> int:
        """Takes `count` blocks in the order of lru; see `least`."""
        left = count
        for row in self._runs.nonempty().tolist():
            while left and self._runs.start[row] < self._runs.end[row]:
                left -= self._evict_from(row, left, by_score=False)[0]
            if not left:
                break
        return count - left

    def _evict_from(self, row: int, count: int, by_score: bool) -> tuple[int, int]:
        """Takes up to `count` blocks from a run's end; returns how many, and the row this makes a candidate, or -1.

        `by_score`: stops where the worth changes, and before blocks that have children.
        """
        runs = self._runs
        views = runs.views
        start, end, serial = views.start[row], views.end[row], views.serial[row]
        owner = serial << self._place_bits
        tail = end == views.size[row]
        if tail and by_score:  # a piece of its own, which has no children
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
        """The row whose last block this is, or -1."""
        runs, owner = self._runs, self._owner_of[block]
        serial, place = owner >> self._place_bits, owner & ((1 << self._place_bits) - 1)
        row = int(runs.serial[: runs.count].searchsorted(serial))
        if row == runs.count or runs.views.serial[row] != serial:
            return -1  # released since runs were brought up to date: ranked with them next time
        return row if runs.views.end[row] - 1 == place else -1
