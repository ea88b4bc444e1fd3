"""Who is given up: from the end of the run whose last block is worth least, as far as its blocks are worth the same."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from ...table import Ids, count_nonzero, view
from ..base import PoolView
from .runs import FEW, NONE, Runs
from .tables import HazardTables

Numbers = npt.NDArray[Any]
Part = tuple[Ids, int, bool]
"""Blocks of one request that were given up, its serial, and whether the first of them was its last."""

FRESH = 32
"""Runs for each request that scores are kept for: looking at all again costs in proportion to them."""
LEAST, LONGEST = 2, 64
"""Requests that scores are kept for."""
SPARE = 64
"""Runs ranked beyond one for each block."""
LOOK = 64
"""Places looked at together at least."""
GONE = -1.0
"""Score of what the caller said nobody returns to."""


class Chooser:
    """Chooses victims, and knows which runs hang from which block.

    Args:
        pool: The blocks.
        runs: Their runs.
        tables: What they are worth.
        code: Of each block, whose run it is in and where; -1: in none.
        hanging: Of each block, how many runs have it as their parent.
        place_bits: Low bits of a code that are the place.
    """

    def __init__(
        self, pool: PoolView, runs: Runs, tables: HazardTables, code: Numbers, hanging: Numbers, place_bits: int
    ) -> None:
        self._pool = pool
        self._runs = runs
        self._tables = tables
        self._code, self._code_of = code, view(code)
        self._hanging, self._hanging_of = hanging, view(hanging)
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

    def hang(self, rows: list[int]) -> None:
        """The runs of these rows begin behind another block now, or they are over: their chains may be cut."""
        runs, hanging = self._runs, self._hanging_of
        cells, chains = runs.cells, runs.chains
        start_of, end_of, parent_of, places = cells.start, cells.end, cells.parent, 0
        if len(rows) >= FEW:
            index = np.array(rows)
            before = runs.parent.take(index)
            runs.parent[index] = -1
            for block in before[before >= 0].tolist():
                hanging[block] -= 1
            over = runs.start.take(index) >= runs.end.take(index)
            for row in index[over].tolist():
                places += len(chains[row]) // 4
                chains[row] = NONE
            rows = index[~over].tolist()
        for row in rows:
            before = parent_of[row]
            if before >= 0:
                hanging[before] -= 1
            if start_of[row] < end_of[row]:
                parent_of[row] = parent = runs.block(row, start_of[row] - 1)
                hanging[parent] += 1
                runs.cut(row)
            else:
                parent_of[row] = -1
                places += len(chains[row]) // 4
                chains[row] = NONE
        runs.places -= places

    def taken(self) -> list[Part]:
        """The blocks given up since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def rank(self, count: int, now: int) -> None:
        """Scores every run that does not wait for another, and keeps those of which `count` blocks may be taken."""
        runs = self._runs
        rows = runs.alive()
        self._until = now + max(LEAST, min(LONGEST, rows.size // FRESH))
        rows = rows[self._hanging.take(runs.last.take(rows)) == 0]
        scores = self._tables.scores(runs.kind.take(rows), runs.trait.take(rows), now - runs.serial.take(rows))
        certain = runs.certain.take(rows).nonzero()[0]
        if certain.size:
            over = rows[certain]
            scores[certain[runs.end.take(over) > runs.shared.take(over)]] = GONE
        most = SPARE + count * (self._until - now)
        if rows.size > most:
            least = scores.argpartition(most)[:most]
            rows, scores = rows[least], scores[least]
        self._heap = list(zip(scores.tolist(), rows.tolist(), strict=True))
        heapify(self._heap)

    def drop_ranks(self) -> None:
        """Rows have other numbers now."""
        self._heap, self._until = [], 0

    def least(self, count: int, now: int) -> int:
        """Takes up to `count` blocks of the least score out of their runs; returns how many."""
        heap = self._heap
        left = count
        while heap and left:
            row = heappop(heap)[1]
            if not self._may_give(row):
                continue
            given, parent = self._give(row, left, heed=True)
            left -= given
            for other in (row, parent):
                if other >= 0 and self._may_give(other):
                    heappush(heap, (self._score(other, now), other))
        return count - left

    def _may_give(self, row: int) -> bool:
        cells = self._runs.cells
        return bool(cells.start[row] < cells.end[row] and not self._hanging_of[cells.last[row]])

    def _score(self, row: int, now: int) -> float:
        cells = self._runs.cells
        if cells.certain[row] and cells.end[row] > cells.shared[row]:
            return GONE
        return self._tables.score(cells.kind[row], cells.trait[row], now - cells.serial[row])

    def oldest(self, count: int) -> int:
        """Takes `count` blocks in the order of lru; see `least`."""
        left = count
        for row in self._runs.alive().tolist():
            while left and self._runs.start[row] < self._runs.end[row]:
                left -= self._give(row, left, heed=False)[0]
            if not left:
                break
        return count - left

    def _give(self, row: int, count: int, heed: bool) -> tuple[int, int]:
        """Takes blocks from the end of a run; returns how many, and the row that waited for it to end, or -1.

        Args:
            row: The run.
            count: Blocks at most.
            heed: Whether to stop where the worth changes, and before blocks that others hang from.
        """
        runs = self._runs
        cells = runs.cells
        start, end, serial = cells.start[row], cells.end[row], cells.serial[row]
        code = serial << self._place_bits
        tail = end == cells.size[row]
        if tail and heed:  # a piece of its own, which nothing hangs from
            chosen, looked = runs.blocks(row, end - 1, end), 1
            if self._code_of[cells.last[row]] == code + end - 1:
                self._code_of[cells.last[row]] = -1
            else:
                chosen = chosen[:0]
        else:
            low = max(runs.piece(row, start, end) if heed else start, end - max(LOOK, 2 * count))
            ids = runs.blocks(row, low, end)[::-1]
            looked = ids.size
            mine = self._code.take(ids) == np.arange(code + end - 1, code + low - 1, -1)
            if heed:
                stops = self._hanging.take(ids) * mine
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
            self._code[chosen.astype(np.intp)] = -1
        if looked:
            runs.end_at(row, end - looked)
        waited = -1
        if end - looked <= start:
            parent = cells.parent[row]
            if parent >= 0:
                cells.parent[row] = -1
                self._hanging_of[parent] -= 1
                if not self._hanging_of[parent] and self._code_of[parent] >= 0:
                    waited = self._row_ending_in(parent)
        number = len(chosen)
        if number:
            self._parts.append((chosen, serial, bool(tail)))
        return number, waited

    def _row_ending_in(self, block: int) -> int:
        """The row whose last block this is, or -1."""
        runs, code = self._runs, self._code_of[block]
        serial, place = code >> self._place_bits, code & ((1 << self._place_bits) - 1)
        row = int(runs.serial[: runs.count].searchsorted(serial))
        if row == runs.count or runs.cells.serial[row] != serial:
            return -1  # released since runs were brought up to date: ranked with them next time
        return row if runs.cells.end[row] - 1 == place else -1
