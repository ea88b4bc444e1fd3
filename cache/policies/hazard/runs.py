"""State per request: the blocks it used last and nobody since are one run of its chain."""

from __future__ import annotations

from sys import byteorder
from typing import Any

import numpy as np
import numpy.typing as npt

from ...table import Ids, view
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
    "base": ("i4", 1),
    "flushed": ("i4", 1),
    "lives": ("i2", 2 * USES),
}
LEAST = 64
"""Rows made at once at least."""
SHORT = 8
"""Chains that are kept whole: to cut them saves nothing."""
FEW = 16
"""Rows up to which a loop is quicker."""
NONE = b""


class Cells:
    """The columns of `Runs` for a look at one row, `bounds` row by row: a third of the time that numpy takes."""

    def __init__(self, runs: Runs) -> None:
        self.serial: Any = view(runs.serial)
        self.start: Any = view(runs.start)
        self.end: Any = view(runs.end)
        self.size: Any = view(runs.size)
        self.bounds: Any = view(runs.bounds.reshape(-1))
        self.last: Any = view(runs.last)
        self.parent: Any = view(runs.parent)
        self.shared: Any = view(runs.shared)
        self.kept: Any = view(runs.kept)
        self.kind: Any = view(runs.kind)
        self.trait: Any = view(runs.trait)
        self.certain: Any = view(runs.certain)
        self.base: Any = view(runs.base)


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
        base: Place of the first block in `chains`.
        flushed: Age up to which its lives are counted as exposed.
        lives: `kept` by 2 * uses + tail, as far as learned, `[rows, 8]`.

    Attributes:
        chains: For each row the blocks of its chain from place `base` on, all of its run among them; int32 as bytes.
        places: Blocks in all chains.
        cells: See `Cells`; others once there is room for more rows.
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
    base: Numbers
    flushed: Numbers
    lives: Numbers

    def __init__(self) -> None:
        self.count = self.places = 0
        self.chains: list[bytes] = []
        self._shorter: set[int] = set()
        for name, (dtype, width) in COLUMNS.items():
            setattr(self, name, np.zeros((LEAST, width) if width > 1 else LEAST, dtype))
        self.cells = Cells(self)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(sum(getattr(self, name).nbytes for name in COLUMNS)) + 4 * self.places

    def add(self, chains: list[bytes]) -> slice:
        """Appends a row for each chain, with all its blocks; the other columns are still to be filled in."""
        sizes = [len(chain) // 4 for chain in chains]
        first, last = self.count, self.count + len(chains)
        if last > self.serial.size:
            for name, (_, width) in COLUMNS.items():
                old = getattr(self, name)
                room = max(last, 9 * old.shape[0] // 8 + LEAST)
                new = np.zeros((room, width) if width > 1 else room, old.dtype)
                new[:first] = old[:first]
                setattr(self, name, new)
            self.cells = Cells(self)
        self.count = last
        self.chains += chains
        rows = slice(first, last)
        self.start[rows] = self.shared[rows] = self.base[rows] = 0
        self.size[rows] = sizes
        self.places += sum(sizes)
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

    def begin_at(self, rows: Numbers, first: Numbers, last: Numbers) -> list[int]:
        """Runs from whose places `first` to `last` requests went on begin behind them; returns the rows that do."""
        each = rows.tolist()
        if len(each) >= FEW and len(set(each)) == len(each):
            start = self.start.take(rows)
            here = (first <= start) & (start < last)
            rows = rows[here]
            self.start[rows] = last[here]
            begun: list[int] = rows.tolist()
            return begun
        start_of, moved = self.cells.start, set()
        for row, begins, ends in zip(each, first.tolist(), last.tolist(), strict=True):
            if begins <= start_of[row] < ends:  # one by one: several requests may have gone on from a run
                start_of[row] = ends
                moved.add(row)
        return list(moved)

    def end_at(self, row: int, end: int) -> None:
        """The run of a row ends before a place of its chain that was in it."""
        cells = self.cells
        cells.end[row] = end
        if end > cells.start[row]:
            kind, bounds, at = cells.kind[row], cells.bounds, 3 * row
            uses = (bounds[at] >= end) + (bounds[at + 1] >= end) + (bounds[at + 2] >= end)
            cells.kind[row] = kind - kind % USES + uses
            cells.trait[row] %= TRAITS
            cells.last[row] = self.block(row, end - 1)
        self._shorter.add(row)

    def block(self, row: int, place: int) -> int:
        """The block at a place of a chain that was in its run lately."""
        at = 4 * (place - self.cells.base[row])
        return int.from_bytes(self.chains[row][at : at + 4], byteorder)

    def blocks(self, row: int, first: int = 0, last: int | None = None) -> Ids:
        """Blocks at places of a chain that were in its run lately; all that are left of it."""
        base, chain = self.cells.base[row], self.chains[row]
        if last is None:
            return np.frombuffer(chain, np.int32)
        return np.frombuffer(chain, np.int32, last - first, 4 * (first - base))

    def cut_shorter(self) -> None:
        """Cuts what came to an end earlier, once nobody may ask for blocks behind it any more."""
        for row in self._shorter:
            self.cut(row)
        self._shorter.clear()

    def cut(self, row: int) -> None:
        """Lets go of blocks of a chain once few of them are in its run."""
        cells, chain = self.cells, self.chains[row]
        start, end, size = cells.start[row], cells.end[row], len(chain) // 4
        if start >= end:
            left = NONE
        elif size > SHORT and size > 2 * (end - start):
            base = cells.base[row]
            left = chain[4 * (start - base) : 4 * (end - base)]
            cells.base[row] = start
        else:
            return
        self.places += len(left) // 4 - size
        self.chains[row] = left

    def piece(self, row: int, start: int, end: int) -> int:
        """Where the blocks of one worth that end at `end` begin."""
        cells = self.cells
        if end == cells.size[row]:
            return end - 1
        at = 3 * row
        for bound in cells.bounds[at : at + 3]:  # falling
            if bound < end:
                start = max(start, bound)
                break
        if cells.certain[row] and start < cells.shared[row] < end:
            start = cells.shared[row]
        return start

    def keep(self, rows: Numbers) -> None:
        """Drops all rows but these, which are ascending."""
        self.chains = [self.chains[row] for row in rows.tolist()]
        for name in COLUMNS:
            column = getattr(self, name)
            column[: rows.size] = column[rows]
        self.count = rows.size
        self.places = sum([len(chain) for chain in self.chains]) // 4

    def check(self, hanging: Numbers) -> None:
        """Asserts that rows hold together, and that so many of them wait for each block."""
        rows, alive = slice(self.count), self.alive()
        start, end = self.start[rows], self.end[rows]
        sizes = np.array([len(chain) // 4 for chain in self.chains], np.intp)
        assert len(self.chains) == self.count, "a row without a chain"
        assert (np.diff(self.serial[rows]) > 0).all(), "rows out of order"
        assert self.places == sizes.sum(), "blocks of chains are miscounted"
        assert ((self.base[rows] <= start) & (end <= self.base[rows] + sizes))[alive].all(), "a run beyond its chain"
        assert [self.block(row, int(end[row]) - 1) for row in alive] == self.last[alive].tolist(), "another last block"
        parent = self.parent[rows]
        waiting = np.bincount(parent[parent >= 0], minlength=hanging.size)
        assert (waiting == hanging).all(), "runs that wait for a block are miscounted"

    def check_blocks(self, code: Numbers, place_bits: int, first: int, notes: list[Ids]) -> None:
        """Asserts that each block is where its code says.

        Args:
            code: Serial of its row and place, -1 for none, `[num_blocks]`.
            place_bits: Low bits of a code that are the place.
            first: Serial of the first request that has no row yet.
            notes: The chains of these requests.
        """
        blocks = (code >= 0).nonzero()[0].tolist()
        for block, serial, place in zip(
            blocks,
            (code[blocks] >> place_bits).tolist(),
            (code[blocks] & ((1 << place_bits) - 1)).tolist(),
            strict=True,
        ):
            if serial >= first:
                assert notes[serial - first][place] == block, "a block that was released is in another place"
                continue
            known, rows = self.find(np.array([serial]))
            assert known.size, "a block without a row"
            assert self.start[rows[0]] <= place < self.end[rows[0]], "a block outside its run"
            assert self.block(int(rows[0]), place) == block, "a block is in another place"
