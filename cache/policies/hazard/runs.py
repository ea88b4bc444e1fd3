"""State per request: the blocks it used last and nobody since are one run of its chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...table import Ids
from .tables import TRAITS, USE_BOUNDS, USES

Numbers = npt.NDArray[Any]

COLUMNS: dict[str, tuple[str, int]] = {
    "serial": ("i8", 1),
    "start": ("i4", 1),
    "end": ("i4", 1),
    "size": ("i4", 1),
    "bounds": ("i4", len(USE_BOUNDS)),
    "last": ("i4", 1),
    "parent": ("i4", 1),
    "shared": ("i4", 1),
    "kept": ("i4", 1),
    "kind": ("i1", 1),
    "trait": ("i1", 1),
    "certain": ("?", 1),
    "flushed": ("i8", 1),
    "weight": ("f4", 1),
    "lives": ("f4", 2 * USES),
}
LEAST = 64
"""Rows made at once at least."""


class Runs:
    """A row for each request that has blocks left or is learned from, in the order of their serial numbers.

    Columns, `[rows]` each, of which the first `count` are in use:
        serial: Number of the request, which is its time too.
        start, end: Places of its chain that are still its run: a later request with the same prefix takes the front
            over, eviction takes the end. Single places between them may be somebody else's by now.
        size: Blocks of its chain.
        bounds: Blocks of the chain used at least 2, 3 and 5 times, `[rows, 3]`.
        last: The block at `end - 1`.
        parent: The block before `start`, -1 for none.
        shared: Blocks of the chain before it have led to other requests too; known where `certain`.
        kept: Blocks that nobody used since, evicted ones included.
        kind, trait: Class and factors of the block at `end - 1`, see `HazardTables.scores`.
        certain: Whether the caller said that it does not go on.
        flushed: Time up to which its lives are counted as exposed.
        weight: Of each of its blocks in what is learned.
        lives: `kept` by 2 * uses + tail, as far as learned, `[rows, 8]`.
    """

    serial: Numbers
    start: Numbers
    end: Numbers
    size: Numbers
    bounds: Numbers
    last: Numbers
    parent: Numbers
    shared: Numbers
    kept: Numbers
    kind: Numbers
    trait: Numbers
    certain: Numbers
    flushed: Numbers
    weight: Numbers
    lives: Numbers

    def __init__(self) -> None:
        self.count = 0
        self.chains: list[Ids] = []
        for name, (dtype, width) in COLUMNS.items():
            setattr(self, name, np.zeros((LEAST, width) if width > 1 else LEAST, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(sum(getattr(self, name).nbytes for name in COLUMNS)) + 4 * sum(chain.size for chain in self.chains)

    def add(self, chains: list[Ids]) -> slice:
        """Appends a row for each chain, with all its blocks; the other columns are still to be filled in."""
        first, last = self.count, self.count + len(chains)
        if last > self.serial.size:
            for name, (_, width) in COLUMNS.items():
                old = getattr(self, name)
                room = max(last, 3 * old.shape[0] // 2)
                new = np.zeros((room, width) if width > 1 else room, old.dtype)
                new[:first] = old[:first]
                setattr(self, name, new)
        self.count = last
        self.chains += chains
        rows = slice(first, last)
        self.start[rows] = self.shared[rows] = 0
        self.size[rows] = [chain.size for chain in chains]
        self.end[rows] = self.kept[rows] = self.size[rows]
        return rows

    def rows_of(self, serials: Numbers) -> npt.NDArray[np.intp]:
        """The rows of requests that have one."""
        return self.serial[: self.count].searchsorted(serials)

    def find(self, serials: Numbers) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Which of some requests have a row still, and the rows."""
        serial = self.serial[: self.count]
        if not self.count:
            return (np.empty(0, np.intp),) * 2
        rows = serial.searchsorted(serials)
        known = (serial.take(rows, mode="clip") == serials).nonzero()[0]
        return known, rows.take(known)

    def groups(self, rows: Numbers) -> npt.NDArray[np.intp]:
        """Their groups, see `HazardTables`."""
        return self.kind.take(rows).astype(np.intp) // USES

    def traits(self, rows: Numbers) -> npt.NDArray[np.intp]:
        """Their traits, see `HazardTables`."""
        return self.trait.take(rows).astype(np.intp) % TRAITS

    def alive(self) -> npt.NDArray[np.intp]:
        """Rows that have blocks."""
        return (self.end[: self.count] > self.start[: self.count]).nonzero()[0]

    def ending_at(self, rows: Numbers, end: Numbers) -> tuple[Numbers, Numbers]:
        """The kind and trait of the last of `end` blocks."""
        uses = (self.bounds[rows] >= end[:, None]).sum(axis=1)
        tail = end == self.size[rows]
        return USES * self.groups(rows) + uses, self.traits(rows) + TRAITS * tail

    def end_at(self, row: int, end: int) -> None:
        """The run of a row ends before a place of its chain that was in it."""
        self.end[row] = end
        if end > self.start.item(row):
            kind = self.kind.item(row)
            bounds = self.bounds
            uses = (bounds.item(row, 0) >= end) + (bounds.item(row, 1) >= end) + (bounds.item(row, 2) >= end)
            self.kind[row] = kind - kind % USES + uses
            self.trait[row] = self.trait.item(row) % TRAITS
            self.last[row] = self.chains[row].item(end - 1)

    def piece(self, row: int, start: int, end: int) -> int:
        """Where the blocks of one worth that end at `end` begin."""
        if end == self.size.item(row):
            return end - 1
        bounds = self.bounds  # falling
        for at in range(USES - 1):
            bound = bounds.item(row, at)
            if bound < end:
                if bound > start:
                    start = bound
                break
        if self.certain.item(row):
            shared: int = self.shared.item(row)
            if start < shared < end:
                return shared
        return start

    def keep(self, rows: Numbers) -> None:
        """Drops all rows but these, which are ascending."""
        self.chains = [self.chains[row] for row in rows.tolist()]
        for name in COLUMNS:
            column = getattr(self, name)
            column[: rows.size] = column[rows]
        self.count = rows.size
        for row in np.flatnonzero(self.end[: self.count] <= self.start[: self.count]).tolist():
            self.chains[row] = self.chains[row][:0]

    def clear(self) -> None:
        """Forgets every row."""
        self.count = 0
        self.chains.clear()
