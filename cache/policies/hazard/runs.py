"""State of each request: its chain of blocks, and the run of that chain that no later request has used.

A chain is the blocks of a request in order. The state is a table of columns, because a fit reads thousands of requests
at once. Chains are bytes only to save time, since cutting bytes is cheap.
"""

from __future__ import annotations

from sys import byteorder
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt

from ...table import Ids, view

Numbers = npt.NDArray[Any]

USES = 4  # classes of use: a block used once, at least 2, 3 and 5 times
USE_BOUNDS = np.array([2, 3, 5])
COVARIATES = 64  # bucket of new blocks + 8 * bucket of output (see `model`); a request's last block has 64 more

LEAST = 64  # minimum number of rows to add
TRIM_MIN = 8  # chains of up to this many blocks are not trimmed, which would save nothing
NO_BLOCKS = b""


class RunTable:
    """A table with a row for each request that has blocks left or is learned from, in the order of serial numbers.

    Columns are `[rows, ...]`, of which the first `count` rows are in use. `views` are flat views of the columns, which
    read a single row in a third of numpy's time. `chains` has the blocks of each row's chain from place `base` on, as
    the bytes of int32 values. `places` is the number of blocks in all `chains`.
    """

    # Each column has a type of elements, and their number for each row.
    serial: Annotated[Numbers, "i8", 1]  # number of the request, which is also its time
    start: Annotated[Numbers, "i4", 1]  # first place of the run; later requests with this prefix take the front
    end: Annotated[Numbers, "i4", 1]  # place after the run; eviction lowers it; later requests may own places before it
    size: Annotated[Numbers, "i4", 1]  # number of blocks in the chain
    bounds: Annotated[Numbers, "i4", len(USE_BOUNDS)]  # number of blocks of the chain used at least 2, 3 and 5 times
    last: Annotated[Numbers, "i4", 1]  # the block at `end - 1`
    parent: Annotated[Numbers, "i4", 1]  # the block before `start`; -1: none
    shared: Annotated[Numbers, "i4", 1]  # place after the last block from which a request continued; set if `final`
    owned: Annotated[Numbers, "i4", 1]  # number of blocks that no other request has used since, evicted ones included
    stratum: Annotated[
        Numbers, "i1", 1
    ]  # with covariates, the class of the block at `end - 1`; see `HazardModel.scores`
    covariates: Annotated[Numbers, "i1", 1]
    final: Annotated[Numbers, "?", 1]  # whether the caller said that the conversation is over
    base: Annotated[Numbers, "i4", 1]  # place of the first block in `chains`
    counted_to: Annotated[Numbers, "i4", 1]  # age up to which its exposure is counted
    at_risk: Annotated[Numbers, "i2", 2 * USES]  # number of owned blocks in each cell, 2 * uses + tail, counted so far

    def __init__(self) -> None:
        self.count = self.places = 0
        self.chains: list[bytes] = []
        self._shortened: set[int] = set()
        for name, (dtype, width) in COLUMNS.items():
            setattr(self, name, np.zeros((LEAST, width) if width > 1 else LEAST, dtype))
        self._make_views()

    def _make_views(self) -> None:
        self.views: Any = SimpleNamespace(**{name: view(getattr(self, name).reshape(-1)) for name in COLUMNS})

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(sum(getattr(self, name).nbytes for name in COLUMNS)) + 4 * self.places

    def add(self, chains: list[bytes]) -> slice:
        """Append a row for each chain with all its blocks. The caller fills in the other columns."""
        sizes = [len(chain) // 4 for chain in chains]
        first, last = self.count, self.count + len(chains)
        if last > self.serial.size:
            for name, (_, width) in COLUMNS.items():
                old = getattr(self, name)
                room = max(last, 9 * old.shape[0] // 8 + LEAST)
                new = np.zeros((room, width) if width > 1 else room, old.dtype)
                new[:first] = old[:first]
                setattr(self, name, new)
            self._make_views()
        self.count = last
        self.chains += chains
        rows = slice(first, last)
        self.start[rows] = self.shared[rows] = self.base[rows] = 0
        self.size[rows] = sizes
        self.places += sum(sizes)
        self.end[rows] = self.owned[rows] = self.size[rows]
        return rows

    def find(self, serials: Numbers) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return which of these requests still have a row, and the rows."""
        serial = self.serial[: self.count]
        if not self.count:
            return (np.empty(0, np.intp),) * 2
        rows = serial.searchsorted(serials)
        known = (serial.take(rows, mode="clip") == serials).nonzero()[0]
        return known, rows.take(known)

    def groups_of(self, rows: Numbers) -> npt.NDArray[np.intp]:
        """Return the group of each row: its stratum without the class of uses."""
        return self.stratum.take(rows).astype(np.intp) // USES

    def covariates_of(self, rows: Numbers) -> npt.NDArray[np.intp]:
        """Return the covariates of rows, without the mark of a last block."""
        return self.covariates.take(rows).astype(np.intp) % COVARIATES

    def nonempty(self) -> npt.NDArray[np.intp]:
        """Return the rows that have blocks left."""
        return (self.end[: self.count] > self.start[: self.count]).nonzero()[0]

    def class_at(self, rows: Numbers, end: Numbers) -> tuple[Numbers, Numbers]:
        """Return the stratum and covariates of the block at place `end - 1` of each chain."""
        uses = (self.bounds[rows] >= end[:, None]).sum(axis=1)
        tail = end == self.size[rows]
        return USES * self.groups_of(rows) + uses, self.covariates_of(rows) + COVARIATES * tail

    def advance_starts(self, rows: Numbers, first: Numbers, last: Numbers) -> list[int]:
        """Move the starts of runs after places `first` to `last`, which were reused; return the changed rows."""
        start_of, moved = self.views.start, set()
        for row, begins, ends in zip(rows.tolist(), first.tolist(), last.tolist(), strict=True):
            if begins <= start_of[row] < ends:  # one by one, because several requests may continue one run
                start_of[row] = ends
                moved.add(row)
        return list(moved)

    def shrink_to(self, row: int, end: int) -> None:
        """End a run before a place of its chain."""
        views = self.views
        views.end[row] = end
        if end > views.start[row]:
            stratum, bounds, at = views.stratum[row], views.bounds, 3 * row
            uses = (bounds[at] >= end) + (bounds[at + 1] >= end) + (bounds[at + 2] >= end)
            views.stratum[row] = stratum - stratum % USES + uses
            views.covariates[row] %= COVARIATES
            views.last[row] = self.block(row, end - 1)
        self._shortened.add(row)

    def block(self, row: int, place: int) -> int:
        """Return the block at a place of a chain. The place must not have been trimmed; see `trim`."""
        at = 4 * (place - self.views.base[row])
        return int.from_bytes(self.chains[row][at : at + 4], byteorder)

    def blocks(self, row: int, first: int = 0, last: int | None = None) -> Ids:
        """Return the blocks at places `first` to `last` of a chain, which must not have been trimmed.

        Without `last`, return all blocks that are kept.
        """
        base, chain = self.views.base[row], self.chains[row]
        if last is None:
            return np.frombuffer(chain, np.int32)
        return np.frombuffer(chain, np.int32, last - first, 4 * (first - base))

    def trim_all(self) -> None:
        """Trim the chains whose runs were shortened. Call this when nothing needs the blocks after their ends."""
        for row in self._shortened:
            self.trim(row)
        self._shortened.clear()

    def trim(self, row: int) -> None:
        """Drop the blocks of a chain that are outside its run, if more than half of the chain is."""
        views, chain = self.views, self.chains[row]
        start, end, size = views.start[row], views.end[row], len(chain) // 4
        if start >= end:
            left = NO_BLOCKS
        elif size > TRIM_MIN and size > 2 * (end - start):
            base = views.base[row]
            left = chain[4 * (start - base) : 4 * (end - base)]
            views.base[row] = start
        else:
            return
        self.places += len(left) // 4 - size
        self.chains[row] = left

    def piece_start(self, row: int, start: int, end: int) -> int:
        """Return the first place, from `start` on, of the blocks that have the same score as the block at `end - 1`."""
        views = self.views
        if end == views.size[row]:
            return end - 1
        at = 3 * row
        for bound in views.bounds[at : at + 3]:  # in descending order
            if bound < end:
                start = max(start, bound)
                break
        if views.final[row] and start < views.shared[row] < end:
            start = views.shared[row]
        return start

    def keep(self, rows: Numbers) -> None:
        """Drop all rows except these, which ascend."""
        self.chains = [self.chains[row] for row in rows.tolist()]
        for name in COLUMNS:
            column = getattr(self, name)
            column[: rows.size] = column[rows]
        self.count = rows.size
        self.places = sum([len(chain) for chain in self.chains]) // 4

    def check(self, child_count: Numbers) -> None:
        """Assert that rows are consistent and that `child_count` is right for each block."""
        rows, alive = slice(self.count), self.nonempty()
        start, end = self.start[rows], self.end[rows]
        sizes = np.array([len(chain) // 4 for chain in self.chains], np.intp)
        assert len(self.chains) == self.count, "a row without a chain"
        assert (np.diff(self.serial[rows]) > 0).all(), "rows out of order"
        assert self.places == sizes.sum(), "blocks of chains are miscounted"
        assert ((self.base[rows] <= start) & (end <= self.base[rows] + sizes))[alive].all(), "a run beyond its chain"
        assert [self.block(row, int(end[row]) - 1) for row in alive] == self.last[alive].tolist(), "another last block"
        parent = self.parent[rows]
        children = np.bincount(parent[parent >= 0], minlength=child_count.size)
        assert (children == child_count).all(), "children of a block are miscounted"

    def check_blocks(self, owner: Numbers, place_bits: int, first: int, pending: list[Ids]) -> None:
        """Assert that each block is where `owner` says.

        Requests from serial `first` on have their chains in `pending`.
        """
        for block in (owner >= 0).nonzero()[0].tolist():
            serial, place = divmod(owner.item(block), 1 << place_bits)
            if serial >= first:
                assert pending[serial - first][place] == block, "a block that was released is in another place"
                continue
            known, rows = self.find(np.array([serial]))
            assert known.size, "a block without a row"
            assert self.start[rows[0]] <= place < self.end[rows[0]], "a block outside its run"
            assert self.block(int(rows[0]), place) == block, "a block is in another place"


COLUMNS: dict[str, tuple[str, int]] = {
    name: hint.__metadata__ for name, hint in get_type_hints(RunTable, include_extras=True).items()
}
"""The annotated columns of `RunTable`: type and number of elements by name."""
