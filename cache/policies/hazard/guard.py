"""The guard, which decides whether lru or the learned order evicts.

It always simulates lru. While lru evicts, it also simulates the learned order in a shadow cache.
"""

from __future__ import annotations

import numpy as np

from .model import HazardModel
from .runs import Numbers, RunTable
from .victims import FINISHED_SCORE

HALF_LIFE = 1000  # number of requests after which a hit counts half
CREDIT = 2.0  # number of hits the pool may lose for each hit that the learned order is ahead
SLACK, SLACK_MOST = 0.05, 8.0  # the pool may always lose this share of the capacity, up to so many mean request sizes
# Leads count up to this share of the capacity, so that old hits do not hide current losses. The limit is at least and
# at most so many mean request sizes.
SHARE, LEAST, MOST = 0.125, 5.0, 10.0
STALE = 32  # the shadow cache is evicted from in the middle of a batch once it is over its capacity by a 32nd
PIECES = 64  # the shadow cache evicts from a 64th of its runs before it ranks them again, to save time

# A use of consecutive blocks of an earlier request: the serial of the request that used them, the earlier request's
# row in `RunTable`, the first place in its chain, the place after the last one, and whether the blocks were cached.
Use = tuple[int, int, int, int, bool]


class ShadowGuard:
    """A guard that simulates lru and decides whether lru or the learned order is in force.

    At first lru is in force, because nothing can be learned before blocks are used again. The learned order takes over
    when two things are true: requests have used as many blocks of earlier ones as a mean request has, and the learned
    order would have hit at least what lru hit. Lru takes over again when the pool has lost too many hits. A small slack
    is excused, and CREDIT hits for each hit that the learned order is ahead of lru. While lru is in force, a shadow
    cache simulates the learned order, whose lead may then excuse the pool's loss.

    Simulating lru needs no second cache: lru would hold the most recently used blocks, including evicted ones, up to
    the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.learned = False  # whether the learned order is in force
        self._begun = False  # whether it has ever been
        self.switches = 0  # number of returns to lru
        self._capacity = capacity
        self._requests = 0
        self._mean = 0.0  # mean number of blocks of a request
        self._used = 0  # number of blocks of earlier requests that were used, in the cache or not
        self._pool_lead = 0.0  # hits of the pool minus those of lru
        self._lead = 0.0  # hits of the learned order minus those of lru
        self._edge = 0  # serial of the oldest request whose blocks lru would still hold
        self._inside = 0  # number of blocks last used since then
        self._room = capacity  # room for the blocks of the edge's request
        self._start: Numbers = np.empty(0, np.int32)  # for each row, the run that the shadow cache holds
        self._end: Numbers = np.empty(0, np.int32)
        self._missing = -1  # time at which a request missed a block in the shadow cache; it then hits no later block

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

    def forgotten(self, runs: RunTable, rows: Numbers) -> None:
        """Record that ghosts of these rows were lost."""
        self._inside -= int(np.count_nonzero(runs.serial[rows] >= self._edge))

    def follow(self, runs: RunTable, rows: slice, uses: list[Use], capacity: int, model: HazardModel) -> None:
        """Simulate uses of blocks, and the ends of the requests in new rows, in the order of time.

        `uses` has the latest use first and becomes empty. This also updates `owned` of the used rows. `capacity` is the
        number of blocks for requests that have ended.
        """
        serial_of, owned_of = runs.views.serial, runs.views.owned
        if not self.learned:
            new = np.zeros(rows.stop - self._end.size, np.int32)  # empty until the requests end
            self._start, self._end = np.append(self._start, new), np.append(self._end, new)
        edge = int(runs.serial[: runs.count].searchsorted(self._edge))
        for row, size in enumerate(runs.size[rows].tolist(), rows.start):
            while uses and uses[-1][0] <= serial_of[row]:
                self._count(runs, *uses.pop())
            if not self.learned:
                held = int((self._end - self._start).clip(0).sum())
                if row == rows.stop - 1 or held + size > capacity + capacity // STALE:
                    self._evict(runs, model, serial_of[row], held, capacity - size)
                self._end[row] = size
            self._requests += 1
            self._mean += (size - self._mean) / min(self._requests, 300)
            self._inside += size
            while edge < row and self._inside - owned_of[edge] >= capacity:
                self._inside -= owned_of[edge]
                edge += 1
            self._edge = serial_of[edge]
            self._room = max(0, capacity - self._inside + owned_of[edge])
        while uses:
            self._count(runs, *uses.pop())

    def _count(self, runs: RunTable, time: int, row: int, first: int, last: int, resident: bool) -> None:
        """Count the hits of a use: those of the pool, of lru and of the learned order."""
        lru = number = last - first
        serial = runs.views.serial[row]
        runs.views.owned[row] -= number
        if serial < self._edge:
            lru = 0
        else:
            self._inside -= number
            if serial == self._edge:  # lru evicts the end of a request first
                lru, self._room = min(number, self._room), max(self._room - number, 0)
        pool = learned = number if resident else 0
        if not self.learned:
            start, end = self._start.item(row), self._end.item(row)
            learned = max(0, min(last, end) - max(first, start)) if time != self._missing else 0
            self._start[row] = max(start, last)
            if learned < number:
                self._missing = time
        self._used += number
        self._pool_lead += pool - lru
        self._lead += learned - lru

    def judge(self, number: int, runs: RunTable) -> None:
        """Decide which order is in force, `number` requests after the last decision."""
        limit = min(max(SHARE * self._capacity, LEAST * self._mean), MOST * self._mean)
        fade = 0.5 ** (number / HALF_LIFE)
        self._pool_lead = max(-limit, min(self._pool_lead * fade, limit))
        self._lead = max(-limit, min(self._lead * fade, limit))
        slack = min(SLACK * self._capacity, SLACK_MOST * self._mean)
        before, self.learned = self.learned, self._pool_lead + slack + CREDIT * max(self._lead, 0.0) >= 0.0
        if not self._begun:
            self._begun = self.learned = self._used >= self._mean and self._lead >= 0.0
        if self.learned:
            self._start = self._end = np.empty(0, np.int32)
        elif before:
            self.switches += 1
            self._start, self._end = runs.start[: runs.count].copy(), runs.end[: runs.count].copy()

    def _evict(self, runs: RunTable, model: HazardModel, now: int, held: int, capacity: int) -> None:
        """Evict from the shadow cache, which has `held` blocks, in the learned order, down to a capacity."""
        excess = held - max(capacity, 0)
        while excess > 0:
            rows = np.flatnonzero(self._end > self._start)
            stratum, covariates = runs.class_at(rows, self._end[rows])
            scores = model.scores(stratum, covariates, now - runs.serial[rows])
            scores[runs.final[rows] & (self._end[rows] > runs.shared[rows])] = FINISHED_SCORE
            for row in rows[scores.argsort()[: 1 + rows.size // PIECES]].tolist():
                start, end = self._start.item(row), self._end.item(row)
                gone = min(excess, end - runs.piece_start(row, start, end))
                self._end[row] = end - gone
                excess -= gone
                if not excess:
                    break
