"""Whether the learned order or lru's is in force: the one that hit more of late."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .runs import Runs
from .tables import HazardTables

Numbers = npt.NDArray[Any]

add_reduce = np.add.reduce
"""Without the Python call of `sum`."""

HALF_LIFE = 1000
"""Requests after which a hit counts half."""
SHARE = 0.125
"""Of the capacity: hits that one order may fall behind the other. To change over costs blocks that are held."""
LEAST, MOST = 3.0, 10.0
"""The same in mean requests: less is chance in caches of few requests, more is too much to lose in large ones."""


class Guard:
    """Runs lru on paper, and the learned order too while lru is in force.

    What lru would hold needs no second cache: it is the blocks used last, evicted ones included, back to the request at
    which they fill the room.

    Attributes:
        learned: Whether the learned order is in force.
        mean: Mean blocks of a request.
        switches: How often lru came into force.
    """

    def __init__(self, capacity: int) -> None:
        self.learned = True
        self.mean = 0.0
        self.switches = 0
        self._capacity = capacity
        self._requests = 0
        self._balance = 0.0
        self._edge = 0  # serial of the oldest request that lru would have blocks of
        self._inside = 0  # blocks last used since
        self._room = capacity  # for the edge's own
        self._start: Numbers = np.empty(0, np.int32)
        self._end: Numbers = np.empty(0, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._start.nbytes + self._end.nbytes

    @property
    def edge(self) -> int:
        """Rows of older requests do not matter to it."""
        return self._edge

    def needed(self, runs: Runs) -> Numbers:
        """Per row, whether it is needed on paper."""
        serial = runs.serial[: runs.count]
        needed = (serial >= self._edge) & (runs.kept[: runs.count] > 0)
        if not self.learned:
            needed |= self._end > self._start
        return needed

    def keep(self, rows: Numbers) -> None:
        """All rows but these are dropped."""
        if not self.learned:
            self._start, self._end = self._start[rows], self._end[rows]

    def released(self, sizes: Numbers) -> None:
        """Requests have ended and left so many blocks each, in new rows."""
        self._requests += sizes.size
        total = int(add_reduce(sizes))
        self.mean += (total / sizes.size - self.mean) * min(sizes.size / min(self._requests, 300), 1.0)
        self._inside += total
        if not self.learned:
            self._start = np.append(self._start, np.zeros(sizes.size, np.int32))
            self._end = np.append(self._end, sizes)

    def fill(self, runs: Runs, capacity: int) -> None:
        """Finds the request at which the blocks used last fill the room, once all that was used has been told."""
        row = int(runs.serial[: runs.count].searchsorted(self._edge))
        kept_of = runs.cells.kept
        kept = kept_of[row]
        while self._inside - kept >= capacity and row < runs.count - 1:
            self._inside -= kept
            row += 1
            kept = kept_of[row]
        self._edge = runs.serial.item(row)
        self._room = max(0, capacity - self._inside + kept)

    def used(self, runs: Runs, rows: Numbers, first: Numbers, last: Numbers, resident: bool) -> None:
        """Blocks at places `first` to `last` of these rows were asked for, and were there (`resident`) or not."""
        edge = self._edge
        lru = hits = at_edge = 0
        for serial, number in zip(runs.serial.take(rows).tolist(), (last - first).tolist(), strict=True):
            hits += number
            if serial >= edge:
                lru += number
                if serial == edge:
                    at_edge += number
        self._inside -= lru
        lru -= max(at_edge - self._room, 0)
        self._room = max(self._room - at_edge, 0)
        if not resident:
            hits = 0
        if not self.learned:
            hits = int((np.minimum(last, self._end[rows]) - np.maximum(first, self._start[rows])).clip(0).sum())
            np.maximum.at(self._start, rows, last.astype(np.int32))
        self._balance += hits - lru

    def forgotten(self, runs: Runs, rows: Numbers) -> None:
        """Ghosts of these rows are not remembered any more."""
        self._inside -= int(np.count_nonzero(runs.serial[rows] >= self._edge))

    def judge(self, number: int, runs: Runs) -> None:
        """Decides which order is in force, after so many requests.

        The lead of one order over the other is bounded by what it takes to change over: what was won long ago does not
        cover what is lost now, and what was lost long ago does not keep the better order out.
        """
        stake = min(max(SHARE * self._capacity, LEAST * self.mean), MOST * self.mean)
        balance = self._balance * 0.5 ** (number / HALF_LIFE)
        self._balance = max(-stake, min(balance, stake))
        if self.learned and balance < -stake:
            self.learned = False
            self.switches += 1
            self._start, self._end = runs.start[: runs.count].copy(), runs.end[: runs.count].copy()
        elif not self.learned and self._balance > 0:
            self.learned = True
            self._start = self._end = np.empty(0, np.int32)

    def evict_on_paper(self, runs: Runs, tables: HazardTables, now: int, capacity: int) -> None:
        """While lru is in force: what the learned order would have given up by now."""
        excess = int((self._end - self._start).clip(0).sum()) - capacity
        while excess > 0:
            rows = np.flatnonzero(self._end > self._start)
            kind, trait = runs.ending_at(rows, self._end[rows])
            scores = tables.scores(kind, trait, now - runs.serial[rows])
            for row in rows[scores.argsort()[:64]].tolist():
                end = int(self._end[row])
                piece = runs.piece(row, int(self._start[row]), end)
                gone = min(excess, end - piece)
                self._end[row] = end - gone
                excess -= gone
                if not excess:
                    break
