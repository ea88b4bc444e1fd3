"""What becomes of victims: ghosts, which are asked for again or forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...table import Ids
from .ghosts import Keys, Noted, RequestGhosts
from .guard import Guard
from .lives import Lives
from .runs import Runs
from .tables import USE_BOUNDS
from .victims import Part

Numbers = npt.NDArray[Any]

TOGETHER, LATE = 256, 8
"""Victims, and choices of them, after which they become ghosts at the latest."""
ONE = np.int32(1)


class Evicted:
    """Notes victims and filled blocks, and works them off together.

    Args:
        ghosts: What is remembered.
        runs: Rows of the requests that used them last.
        guard: Told of what lru might still have.
        lives: Told of what was asked for again, and of what is forgotten.
        earlier_uses: Per block, uses before it was evicted and filled again; kept here.

    Attributes:
        filled: Times, blocks, keys and lengths of prefixes of what was filled and not worked off yet.
    """

    def __init__(self, ghosts: RequestGhosts, runs: Runs, guard: Guard, lives: Lives, earlier_uses: Numbers) -> None:
        self._ghosts = ghosts
        self._runs = runs
        self._guard = guard
        self._lives = lives
        self._earlier_uses = earlier_uses
        self.filled: list[tuple[int, Ids, Keys, Ids]] = []
        self._gone: list[tuple[list[Part], Keys, Numbers]] = []
        self._num_gone = 0

    @property
    def nbytes(self) -> int:
        """Bytes of notes."""
        return 16 * (self._num_gone + sum(ids.size for _, ids, _, _ in self.filled))

    def gone(self, parts: list[Part], keys: Keys, uses: Numbers) -> None:
        """Blocks were given up: by request, then their keys and uses in this order."""
        self._gone.append((parts, keys, uses))
        self._num_gone += keys.size

    def work_off(self, now: int) -> None:
        """Brings ghosts, guard and lives up to date, at the number of the next request."""
        if self._num_gone > TOGETHER or len(self._gone) >= LATE:
            self._remember(now)
        if self.filled:
            self._recall(now)

    def _remember(self, now: int) -> None:
        """Makes ghosts of victims."""
        parts = [part for parts, _, _ in self._gone for part in parts]
        sizes = [ids.size for ids, _, _ in parts]
        serials = np.repeat(np.array([serial for _, serial, _ in parts], np.int64), sizes)
        tails = np.zeros(serials.size, np.int64)
        tails[np.cumsum(sizes) - sizes] = [tail for _, _, tail in parts]
        keys, uses = (np.concatenate(part) for part in list(zip(*self._gone, strict=True))[1:])
        uses = np.minimum(uses, USE_BOUNDS[-1]).astype(np.int64)
        self._gone, self._num_gone = [], 0
        self._forget(self._ghosts.remember(keys, Noted(serials, uses, tails), now))

    def _recall(self, now: int) -> None:
        """Blocks were filled: some of them are evicted ones that were asked for again."""
        times, parts, keys, lengths = zip(*self.filled, strict=True)
        self.filled = []
        ids = np.concatenate(parts)
        found, noted = self._ghosts.recall(np.concatenate(keys), now)
        self._earlier_uses[ids] = 0
        if not found.size:
            return
        self._earlier_uses[ids[found]] = noted.uses
        runs = self._runs
        known, rows = runs.find(noted.serial)
        if not known.size:
            return
        found = found[known]
        begin = np.array([part.size for part in parts]).cumsum()
        time = np.array(times)[begin.searchsorted(found, side="right")]
        place = np.minimum(np.concatenate(lengths)[found] - 1, runs.size[rows] - 1)
        self._guard.used(runs, rows, place, place + 1, resident=False)
        np.subtract.at(runs.kept, rows, ONE)
        self._lives.recalled(rows, noted.uses[known], noted.tail[known], time)

    def _forget(self, lost: Noted) -> None:
        known, rows = self._runs.find(lost.serial)
        if known.size:
            self._guard.forgotten(self._runs, rows)
            np.subtract.at(self._runs.kept, rows, ONE)
            self._lives.forgotten(rows, lost.uses[known], lost.tail[known])
