"""Turns what happened to runs into what is learned: which lives ended in reuse at which age, and which went on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .runs import Runs
from .tables import USE_BOUNDS, USES, HazardTables

Numbers = npt.NDArray[Any]
KINDS = 2 * USES
SUM = np.ones(KINDS, np.float32)
MOST = (1 << 15) - 1
"""Lives of a request that are counted."""
YOUNG = 512
"""Requests whose lives are counted in every call."""


class Lives:
    """Collects reuses, and gives them with all exposure to the tables when these are to be fitted.

    Args:
        runs: Rows, of which `lives` and `flushed` are kept here.
        tables: What is learned.
    """

    def __init__(self, runs: Runs, tables: HazardTables) -> None:
        self._runs = runs
        self._tables = tables
        self._calls = 0
        self._begun = 0  # rows before it have `lives`
        self._used: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []  # rows, first and last places, times
        self._recalled: list[tuple[Numbers, Numbers, Numbers]] = []  # rows, kinds, times

    @property
    def nbytes(self) -> int:
        """Bytes of what is not learned yet."""
        return sum(part.nbytes for parts in (*self._used, *self._recalled) for part in parts)

    def used(self, rows: Numbers, first: Numbers, last: Numbers, times: Numbers) -> None:
        """Blocks at places `first` to `last` of rows were asked for at these times."""
        self._used.append((rows, first, last, times))

    def recalled(self, rows: Numbers, uses: Numbers, tail: Numbers, times: Numbers) -> None:
        """Evicted blocks were asked for at these times."""
        self._recalled.append((rows, _kind(uses, tail), times))

    def forgotten(self, rows: Numbers, uses: Numbers, tail: Numbers) -> None:
        """Evicted blocks are not remembered any more."""
        begun = rows < self._begun
        np.subtract.at(self._runs.lives, (rows[begun], _kind(uses, tail)[begun]), np.int16(1))

    def learn(self, now: int, stale: bool) -> None:
        """Counts every life up to now; of old requests, whose chances change slowly, in every fourth call.

        Args:
            now: Requests until now.
            stale: See `HazardTables.expose`.
        """
        runs, tables = self._runs, self._tables
        self._begin()
        self._calls += 1
        rows, times, number = self._reuses()
        groups, traits, ages = runs.groups(rows), runs.traits(rows), times - runs.serial[rows]
        ended = number * self._weights(rows)[:, None]
        each, kinds = number.nonzero()
        tables.reuse(groups[each], traits[each], kinds, ages[each], ended[each, kinds])
        np.subtract.at(runs.lives, (rows[each], kinds), np.minimum(number[each, kinds], MOST).astype(np.int16))
        serial = runs.serial[: runs.count]
        due = np.flatnonzero((serial >= now - YOUNG) | (serial % 4 == self._calls % 4))
        lives = np.maximum(runs.lives[due], 0).astype(np.float32)
        waiting = lives @ SUM > 0
        due, lives = due[waiting], lives[waiting] * self._weights(due[waiting])[:, None]
        age = now - runs.serial[due]
        until = np.append(np.maximum(ages, runs.flushed[rows]), age)
        if until.size:
            since = np.append(runs.flushed[rows], runs.flushed[due])
            groups, traits = np.append(groups, runs.groups(due)), np.append(traits, runs.traits(due))
            tables.expose(groups, traits, since, until, np.concatenate((ended.astype(np.float32), lives)), stale)
        runs.flushed[due] = age

    def _begin(self) -> None:
        """New rows: none of their blocks has been asked for again."""
        runs = self._runs
        rows = slice(self._begun, runs.count)
        self._begun = runs.count
        size, lives = np.minimum(runs.size[rows], MOST), runs.lives[rows]
        bounds = np.minimum(runs.bounds[rows].T, MOST)
        lives[:] = 0
        least = size
        for kind, bound in zip(range(0, KINDS, 2), bounds, strict=False):
            lives[:, kind] = least - bound
            least = bound
        lives[:, -2] = least
        last = 2 * _uses(bounds, size) + KINDS * np.arange(size.size)
        flat = runs.lives.reshape(-1)[KINDS * rows.start : KINDS * rows.stop]
        flat[last] -= 1
        flat[last + 1] += 1
        runs.flushed[rows] = 0

    def _weights(self, rows: Numbers) -> npt.NDArray[np.float32]:
        """What each block of a request counts."""
        return (1 / np.sqrt(np.maximum(self._runs.size[rows], 1))).astype(np.float32)

    def _reuses(self) -> tuple[Numbers, Numbers, Numbers]:
        """Rows, times and, by kind, blocks of what was asked for since the last call, `[n]` and `[n, 8]`."""
        runs = self._runs
        parts: list[tuple[Numbers, Numbers, Numbers]] = []
        if self._recalled:
            rows, kinds, times = (np.concatenate(part) for part in zip(*self._recalled, strict=True))
            number = np.zeros((rows.size, KINDS), np.intp)
            number[np.arange(rows.size), kinds] = 1
            parts.append((rows, times, number))
        if self._used:
            rows, first, last, times = (np.concatenate(part) for part in zip(*self._used, strict=True))
            size, bounds = runs.size.take(rows), runs.bounds.take(rows, axis=0).T
            tail = last == size
            number = np.zeros((rows.size, KINDS), np.intp)
            begin, last = first, last - tail
            for kind, bound in zip(range(KINDS - 2, -1, -2), (*bounds[::-1], size), strict=True):
                end = np.minimum(np.maximum(bound, first), last)  # a column at a time: rows of four take much longer
                number[:, kind] = end - begin
                begin = end
            number.reshape(-1)[(KINDS * np.arange(rows.size) + 2 * _uses(bounds, size) + 1)[tail]] = 1
            parts.append((rows, times, number))
        self._used, self._recalled = [], []
        if not parts:
            return np.empty(0, np.intp), np.empty(0, np.intp), np.empty((0, KINDS), np.intp)
        rows, times, number = (np.concatenate(part) for part in zip(*parts, strict=True))
        return rows, times, number

    def renumbered(self) -> None:
        """Rows were dropped, after everything was learned."""
        self._begun = self._runs.count


def _uses(bounds: Numbers, size: Numbers) -> Numbers:
    """The uses of the last of `size` blocks, from the bounds of their uses, `[3, n]`."""
    uses: Numbers = (bounds[0] >= size).astype(np.intp)
    for bound in bounds[1:]:
        uses += bound >= size
    return uses


def _kind(uses: Numbers, tail: Numbers) -> Numbers:
    kinds: Numbers = 2 * USE_BOUNDS.searchsorted(uses, side="right") + tail
    return kinds
