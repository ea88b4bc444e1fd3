"""Evicted blocks: ghosts, which show reuses that a larger cache would have hit, and the shadow cache of lru.

Ghosts keep the model unbiased, because otherwise the idle time of an evicted block would seem to end at its eviction.
The shadow guard simulates the order that is not in force, and decides which order is.
"""

from __future__ import annotations

import numpy as np

from ...table import Ids
from ..ghosts import GhostRecord, Keys, RequestGhosts
from .model import HazardModel, IntervalsAtRisk
from .runs import USE_BOUNDS, Numbers, RunTable
from .victims import FINISHED_SCORE, Part

add_reduce = np.add.reduce  # without the Python call of `sum`

HALF_LIFE = 1000  # number of requests after which a hit counts half
SHARE = 0.125  # share of the capacity: hits by which an order may lag; changing the order costs blocks
LEAST, MOST = 3.0, 10.0  # bounds of the same in mean requests, for small and for large caches


class ShadowGuard:
    """A guard that simulates lru in a shadow cache and decides whether lru or the learned order is in force.

    While lru is in force, it simulates the learned order too. The order with more hits wins. lru is in force first. A
    model that has seen no reuse evicts blocks too early, and learns that only once they are lost. Simulating lru needs
    no second cache, because it would hold the most recently used blocks, evicted ones included, as many as fill the
    capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.learned = False  # whether the learned order is in force
        self.mean = 0.0  # mean number of blocks of a request
        self.switches = 0  # number of returns to lru
        self._capacity = capacity
        self._requests = 0
        self._balance = 0.0
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
        """Return for each row whether a shadow cache needs it."""
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
        """Find the request at which the most recently used blocks fill the capacity, once all uses are known."""
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
        self._balance += hits - lru

    def forgotten(self, runs: RunTable, rows: Numbers) -> None:
        """Record that ghosts of these rows were lost."""
        self._inside -= int(np.count_nonzero(runs.serial[rows] >= self._edge))

    def judge(self, number: int, runs: RunTable) -> None:
        """Decide which order is in force, after `number` requests.

        A lead is bounded by the cost of a change. So old hits do not outweigh current losses, and old losses do not
        exclude the better order.
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

    def evict_in_shadow(self, runs: RunTable, model: HazardModel, now: int, capacity: int) -> None:
        """Evict from the learned order's shadow cache what exceeds the capacity, while lru is in force."""
        excess = int((self._end - self._start).clip(0).sum()) - capacity
        while excess > 0:
            rows = np.flatnonzero(self._end > self._start)
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


GHOST_BATCH, GHOST_CALLS = 256, 8  # victims, or choices, after which victims become ghosts, in batches for speed
ONE = np.int32(1)


class EvictedBlocks:
    """A log of victims and filled blocks, which makes ghosts of victims and finds ghosts of filled blocks, in batches.

    It maintains `earlier_uses`: for each block, its uses before it was evicted and filled again.
    """

    def __init__(
        self,
        ghosts: RequestGhosts,
        runs: RunTable,
        guard: ShadowGuard,
        intervals: IntervalsAtRisk,
        earlier_uses: Numbers,
    ) -> None:
        self._ghosts = ghosts
        self._runs = runs
        self._guard = guard
        self._intervals = intervals
        self._earlier_uses = earlier_uses
        self.filled: list[tuple[int, Ids, Keys, Ids]] = []  # times, blocks, keys and prefix lengths, not drained yet
        self._gone: list[tuple[list[Part], Keys, Numbers]] = []
        self._num_gone = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the log."""
        return 16 * (self._num_gone + sum(ids.size for _, ids, _, _ in self.filled))

    def gone(self, parts: list[Part], keys: Keys, uses: Numbers) -> None:
        """Record evicted blocks: blocks by request, then their keys and uses in this order."""
        self._gone.append((parts, keys, uses))
        self._num_gone += keys.size

    def drain(self, now: int) -> None:
        """Update ghosts, guard and intervals. `now` is the number of the next request."""
        if self._num_gone > GHOST_BATCH or len(self._gone) >= GHOST_CALLS:
            self._remember(now)
        if self.filled:
            self._recall(now)

    def _remember(self, now: int) -> None:
        """Make ghosts of victims."""
        parts = [part for parts, _, _ in self._gone for part in parts]
        sizes = [ids.size for ids, _, _ in parts]
        serials = np.repeat(np.array([serial for _, serial, _ in parts], np.int64), sizes)
        tails = np.zeros(serials.size, np.int64)
        tails[np.cumsum(sizes) - sizes] = [tail for _, _, tail in parts]
        keys, uses = (np.concatenate(part) for part in list(zip(*self._gone, strict=True))[1:])
        uses = np.minimum(uses, USE_BOUNDS[-1]).astype(np.int64)
        self._gone, self._num_gone = [], 0
        lost = self._ghosts.remember(keys, GhostRecord(serials, uses, tails), now)
        known, rows = self._runs.find(lost.serial)
        if known.size:
            self._guard.forgotten(self._runs, rows)
            np.subtract.at(self._runs.owned, rows, ONE)
            self._intervals.forgotten(rows, lost.uses[known], lost.tail[known])

    def _recall(self, now: int) -> None:
        """Find filled blocks that were evicted before."""
        times, parts, keys, lengths = zip(*self.filled, strict=True)
        self.filled = []
        ids = np.concatenate(parts)
        found, records = self._ghosts.recall(np.concatenate(keys), now)
        self._earlier_uses[ids] = 0
        if not found.size:
            return
        self._earlier_uses[ids[found]] = records.uses
        runs = self._runs
        known, rows = runs.find(records.serial)
        if not known.size:
            return
        found = found[known]
        begin = np.array([part.size for part in parts]).cumsum()
        time = np.array(times)[begin.searchsorted(found, side="right")]
        place = np.minimum(np.concatenate(lengths)[found] - 1, runs.size[rows] - 1)
        self._guard.used(runs, rows, place, place + 1, resident=False)
        np.subtract.at(runs.owned, rows, ONE)
        self._intervals.recalled(rows, records.uses[known], records.tail[known], time)
