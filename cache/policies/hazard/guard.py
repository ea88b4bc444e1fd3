"""The guard, which decides whether lru or the learned order evicts.

It always simulates lru. While lru evicts, it also simulates the learned order in a shadow cache.
"""

from __future__ import annotations

import numpy as np

from .model import HazardModel
from .runs import Numbers, RunTable
from .victims import FINISHED_SCORE

add_reduce = np.add.reduce  # without the Python call of `sum`

HALF_LIFE = 1000  # number of requests after which a hit counts half
SHARE = 0.125  # the learned order may trail lru by this share of the capacity, in hits, before lru decides
LEAST, MOST = 3.0, 10.0  # bounds of this lag for small and for large caches, in mean request sizes
UNTRIED = 16  # number of requests after which the learned order is tried if lru has hit nothing


class ShadowGuard:
    """A guard that simulates lru and decides whether lru or the learned order is in force.

    While lru is in force, a shadow cache simulates the learned order too. The order with more hits wins. lru is in
    force first, because a model that has seen no reuse evicts blocks too early. Simulating lru needs no second cache:
    lru would hold the most recently used blocks, including evicted ones, up to the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.learned = False  # whether the learned order is in force
        self.mean = 0.0  # mean number of blocks of a request
        self.switches = 0  # number of returns to lru
        self._capacity = capacity
        self._requests = 0
        self._lead = 0.0  # hits of the learned order minus those of lru
        self._lru_hits = 0
        self._edge = 0  # serial of the oldest request whose blocks lru would still hold
        self._inside = 0  # number of blocks last used since then
        self._room = capacity  # room for the blocks of the edge's request
        self._start: Numbers = np.empty(0, np.int32)
        self._end: Numbers = np.empty(0, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._start.nbytes + self._end.nbytes

    def needed(self, runs: RunTable) -> Numbers:
        """Return for each row whether a simulation still needs it."""
        serial = runs.serial[: runs.count]
        needed = (serial >= self._edge) & (runs.owned[: runs.count] > 0)
        if not self.learned:
            needed |= self._end > self._start
        return needed

    def keep(self, rows: Numbers) -> None:
        """Drop all rows except these."""
        if not self.learned:
            self._start, self._end = self._start[rows], self._end[rows]

    def released(self, sizes: Numbers) -> None:
        """Record that requests have ended and released this many blocks each, in new rows."""
        self._requests += sizes.size
        total = int(add_reduce(sizes))
        self.mean += (total / sizes.size - self.mean) * min(sizes.size / min(self._requests, 300), 1.0)
        self._inside += total
        if not self.learned:
            self._start = np.append(self._start, np.zeros(sizes.size, np.int32))
            self._end = np.append(self._end, sizes)

    def fill(self, runs: RunTable, capacity: int) -> None:
        """Fill the simulated lru cache: find the oldest request whose blocks lru would still hold."""
        row = int(runs.serial[: runs.count].searchsorted(self._edge))
        owned_of = runs.views.owned
        owned = owned_of[row]
        while self._inside - owned >= capacity and row < runs.count - 1:
            self._inside -= owned
            row += 1
            owned = owned_of[row]
        self._edge = runs.serial.item(row)
        self._room = max(0, capacity - self._inside + owned)

    def used(self, runs: RunTable, rows: Numbers, first: Numbers, last: Numbers, resident: bool) -> None:
        """Record that blocks at places `first` to `last` of rows were used, and were cached (`resident`) or not."""
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
        self._lead += hits - lru
        self._lru_hits += lru

    def forgotten(self, runs: RunTable, rows: Numbers) -> None:
        """Record that ghosts of these rows were lost."""
        self._inside -= int(np.count_nonzero(runs.serial[rows] >= self._edge))

    def judge(self, number: int, runs: RunTable) -> None:
        """Decide which order is in force, `number` requests after the last decision.

        The lead is kept within the cost of a change, in hits. So hits of long ago do not hide current losses, and
        losses of long ago do not exclude the better order.
        """
        stake = min(max(SHARE * self._capacity, LEAST * self.mean), MOST * self.mean)
        lead = self._lead * 0.5 ** (number / HALF_LIFE)
        self._lead = max(-stake, min(lead, stake))
        if self.learned and lead < -stake:
            self.learned = False
            self.switches += 1
            self._start, self._end = runs.start[: runs.count].copy(), runs.end[: runs.count].copy()
        elif not self.learned and (lead > 0 or (self._requests > UNTRIED and not self._lru_hits)):
            self.learned = True
            self._start = self._end = np.empty(0, np.int32)

    def evict_in_shadow(self, runs: RunTable, model: HazardModel, now: int, capacity: int) -> None:
        """Evict blocks from the learned order's shadow cache down to its capacity, while lru is in force."""
        excess = int((self._end - self._start).clip(0).sum()) - capacity
        while excess > 0:
            rows = np.flatnonzero(self._end[:-1] > self._start[:-1])  # the last request held its blocks until now
            if not rows.size:
                break
            stratum, covariates = runs.class_at(rows, self._end[rows])
            scores = model.scores(stratum, covariates, now - runs.serial[rows])
            scores[runs.final[rows] & (self._end[rows] > runs.shared[rows])] = FINISHED_SCORE
            for row in rows[scores.argsort()[:64]].tolist():
                end = int(self._end[row])
                piece = runs.piece_start(row, int(self._start[row]), end)
                gone = min(excess, end - piece)
                self._end[row] = end - gone
                excess -= gone
                if not excess:
                    break
