"""Evicted blocks: ghosts, which show reuses that a larger cache would have hit.

Ghosts keep the model unbiased, because otherwise the idle time of an evicted block would seem to end at its eviction.
"""

from __future__ import annotations

import numpy as np

from ...table import Ids
from ..ghosts import GhostRecord, Keys, RequestGhosts
from .guard import ShadowGuard
from .model import IntervalsAtRisk
from .runs import USE_BOUNDS, Numbers, RunTable
from .victims import Part

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

    @property
    def nbytes(self) -> int:
        """Bytes of the log."""
        blocks = sum(ids.size for _, ids, _, _ in self.filled) + sum(keys.size for _, keys, _ in self._gone)
        return 16 * blocks

    def gone(self, parts: list[Part], keys: Keys, uses: Numbers) -> None:
        """Record evicted blocks: blocks by request, then their keys and uses in this order."""
        self._gone.append((parts, keys, uses))

    def drain(self, now: int) -> None:
        """Update ghosts, guard and intervals. `now` is the number of the next request.

        Victims become ghosts first, because a block may return soon after its eviction.
        """
        if self._gone:
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
        self._gone = []
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
