"""Rows of named tensors by slot, which are moved by plain copies in host memory and by kernels elsewhere.

In host memory there is one copy for each run of consecutive slots. For a few rows, Python and PyTorch cost more than
the copy itself, so this code uses little of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...triton_ops import (
    copy_blocks_list,
    gather_blocks_list,
    gather_slots_list,
    join_prefix_list,
    scatter_blocks_list,
    scatter_slots_list,
)
from ...triton_ops._copy.cpu import empty, scatter_rows
from ..runs import Slots, slot_runs
from ..table import Ids
from .step import StepSlots
from .valid import Mask, ValidRows

PLAIN = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
}
"""Dtypes that PyTorch copies bit by bit in every kind of copy."""
Named = dict[str, torch.Tensor]
RowType = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of one token's row
Piece = tuple[bool, int, int]  # whether its rows are cached, and the range of slots (cached) or of new rows
Range = tuple[Ids, int, int, int]  # block table of a request, its length, and the range of its new rows
_ALONE_BYTES = 1 << 20  # below this size, starting threads costs more than it gains
_FEW_RUNS, _RUN_BYTES = 2, 1 << 20  # copies of this size are as fast one by one as together


class NamedRows(NamedTuple):
    """A cached name: its rows, and whether the caller registered it or it was discovered."""

    rows: torch.Tensor
    registered: bool
    features: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int
    flat: torch.Tensor | None
    """`[num_blocks * block_size, *features]` in host memory, if no kernel is needed to move the rows; else None."""


class MissingRowsError(LookupError):
    """No step stored the requested rows of a name, or their blocks have other contents now.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> cache, allocation = pc.TensorCache(manager, 8, 4), manager.allocate("a", range(3))
        >>> cache.register("hidden", (32,), torch.float32)
        >>> try:
        ...     rows = cache.load("a", ["hidden"])
        ... except pc.MissingRowsError:
        ...     print("no step has stored them")
        no step has stored them
    """


class RowStore:
    """The rows of a `TensorCache`, by slot. All slots and blocks passed to it must be in range."""

    def __init__(self, entries: Mapping[str, NamedRows], valid: ValidRows, device: torch.device) -> None:
        self.entries = entries
        self.valid = valid
        self._device = device
        self._swapped: dict[int, tuple[Named, dict[str, Mask]]] = {}
        self._pending: dict[torch.cuda.Stream, torch.cuda.Event] = {}  # accesses of devices to rows in host memory

    def require(self, names: Iterable[str]) -> None:
        """Raise KeyError for a name that is not cached."""
        for name in names:
            if name not in self.entries:
                raise KeyError(f"names: got {name!r}, needs one of {', '.join(map(str, self.entries)) or 'none'}")

    def there(self, names: Sequence[str] | None, table: Ids, count: int) -> dict[str, Mask]:
        """Return for each name which of the first tokens of a block table have a row.

        Without `names`, do so for all names that have a row.
        """
        self.require(names or ())
        blocks = table[: -(-count // self.valid.block_size)]
        there = self.valid.there(self.entries if names is None else names, blocks, count)
        if names is None and count:
            there = {name: here for name, here in there.items() if here.any()}
        return there

    def write(self, slots: StepSlots, new: Named) -> None:
        """Write rows; see `TensorCache.write`."""
        self.valid.clear(slots.kept)
        if not new or slots.high < 0:
            return
        if self.on_host(new):
            for name, tensor in new.items():
                entry = self.entries[name]
                assert entry.flat is not None
                write_rows(entry.rows, entry.flat, slots, tensor, entry.row_bytes)
        else:
            self._scatter(new, slots.index)
        self.valid.mark(new, slots.kept)

    def on_host(self, new: Named) -> bool:
        """Return whether plain copies can move all these rows. Wait for devices that access rows in host memory."""
        if any(self.entries[name].flat is None or not tensor.is_cpu for name, tensor in new.items()):
            return False
        self._wait()
        return True

    def _scatter(self, new: Named, index: torch.Tensor) -> None:
        """Write rows by kernels, with one launch for each device."""
        for device in {tensor.device for tensor in new.values()}:  # one launch for each device
            some = {name: tensor.detach() for name, tensor in new.items() if tensor.device == device}
            if device.type == "cpu":
                self._wait()
            scatter_slots_list(list(some.values()), [self.entries[name].rows for name in some], index)
            self._accessed_on(device)

    def _accessed_on(self, device: torch.device) -> None:
        """Let later accesses of the host wait for what a device was just told to do with rows in host memory."""
        if device.type == "cuda" and self._device.type == "cpu":
            stream = torch.cuda.current_stream(device)
            self._pending[stream] = stream.record_event()

    def read(self, slots: StepSlots, names: Sequence[str]) -> Named:
        """Read rows; see `TensorCache.read`."""
        self.require(names)
        if not self.valid.holds(names, slots.kept):
            raise MissingRowsError(f"{', '.join(names)}: a row of the step's slots is missing")
        self._wait()
        runs, entries = slots.runs, [self.entries[name] for name in names]
        if runs and slots.low >= 0 and all(entry.flat is not None for entry in entries):
            pieces = [(True, first, end) for _, first, end in runs]
            if all(worth_copies(len(runs), slots.count * entry.row_bytes) for entry in entries):
                read = [join_pieces(e.flat, pieces, e.flat, slots.count) for e in entries]  # type: ignore[arg-type]
                return dict(zip(names, read, strict=True))
        return dict(zip(names, gather_slots_list([e.rows for e in entries], slots.index), strict=True))

    def gather(self, names: Sequence[str], slots: Slots, device: str | torch.device | None) -> list[torch.Tensor]:
        """Return the rows in slots, with zeros for slot -1."""
        self._wait()
        if not names:
            return []
        rows = gather_slots_list([self.entries[name].rows for name in names], torch.from_numpy(slots), device)
        self._accessed_on(rows[0].device)
        return rows

    def by_copies(self, names: Sequence[str], ranges: Sequence[Range], new: Named) -> list[torch.Tensor] | None:
        """Join the cached rows and the new rows of some requests by copies in host memory.

        Return None if that needs a kernel or a row is missing.
        """
        self._wait()
        pieces = find_pieces(self.valid, names, ranges)
        if pieces is None:
            return None
        count = sum(length for _, length, _, _ in ranges)
        joined = []
        for name in names:
            entry = self.entries[name]
            if entry.flat is None or not worth_copies(len(pieces), count * entry.row_bytes):
                return None
            joined.append(join_pieces(entry.flat, pieces, new.get(name, entry.flat), count))
        return joined

    def join(
        self,
        new: Named,
        tables: Sequence[Ids],
        lengths: Sequence[int],
        query_start_loc: npt.NDArray[np.integer],
        positions: npt.NDArray[np.integer] | None,
    ) -> list[torch.Tensor]:
        """Return the rows of whole requests: cached rows, and new rows at their positions or else at the ends."""
        self._wait()
        joined = join_prefix_list(
            [self.entries[name].rows for name in new],
            torch.from_numpy(pad_tables(tables)),
            torch.tensor(lengths),
            [rows.detach() for rows in new.values()],
            torch.from_numpy(np.require(query_start_loc, np.int64, ["C", "W"])),
            sum(lengths),
            None if positions is None else torch.from_numpy(np.require(positions, np.int64, ["C", "W"])),
        )
        self._accessed_on(joined[0].device)
        return joined

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy the rows of blocks to other blocks: (source, target) pairs, one after another."""
        self._wait()
        for source, target in pairs:
            if self.entries:
                ids = (torch.tensor([block], device=self._device) for block in (source, target))
                copy_blocks_list([entry.rows for entry in self.entries.values()], *ids)
            self.valid.loaded(target, self.valid.bits_of(source), source)

    def swap_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy the rows of blocks to host memory, (block, host slot) pairs, until they are swapped in."""
        self._wait()
        for block, slot in pairs:
            index = torch.tensor([block])
            rows = gather_blocks_list([entry.rows for entry in self.entries.values()], index) if self.entries else []
            kept = {name: row.cpu() for name, row in zip(self.entries, rows, strict=True)}
            self._swapped[slot] = kept, self.valid.bits_of(block)

    def swap_in(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Restore rows, (host slot, block) pairs. Rows of names that were dropped meanwhile are lost."""
        self._wait()
        for slot, block in pairs:
            rows, bits = self._swapped.pop(slot, ({}, {}))
            known = [name for name in rows if name in self.entries]
            if known:
                targets = [self.entries[name].rows for name in known]
                scatter_blocks_list([rows[name] for name in known], targets, torch.tensor([block]))
            self.valid.loaded(block, bits)

    def _wait(self) -> None:
        """Wait for the pending accesses of devices to rows in host memory."""
        while self._pending:
            self._pending.popitem()[1].synchronize()


def pad_tables(tables: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """Stack block tables and pad them with -1: [len(tables), length of the longest, at least 1]."""
    padded = np.full((len(tables), max([1, *map(len, tables)])), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def worth_copies(num_runs: int, num_bytes: int) -> bool:
    """Return whether copying rows run by run on the host is faster than copying them slot by slot."""
    is_fast_alone = num_bytes <= _ALONE_BYTES or torch.get_num_threads() == 1
    return num_runs <= _FEW_RUNS or num_bytes >= _RUN_BYTES * num_runs or is_fast_alone


def write_rows(rows: torch.Tensor, flat: torch.Tensor, slots: StepSlots, new: torch.Tensor, row_bytes: int) -> None:
    """Write new rows `[num_tokens, *features]` in host memory to their slots, of which there is at least one.

    `rows` are `[num_blocks, block_size, *features]`, contiguous, with the dtype of `new`. `flat` is the same memory
    with slots as first dimension.
    """
    runs, new = slots.runs, new.detach()
    if runs is None or not worth_copies(len(runs), slots.count * row_bytes):
        scatter_rows(new, rows, 2, slots.index, slots.low)
    else:
        for begin, first, end in runs:
            flat[first:end].copy_(new[begin : begin + end - first])


def find_pieces(valid: ValidRows, names: Sequence[str], ranges: Iterable[Range]) -> list[Piece] | None:
    """Return the pieces, in order, from which rows of requests are joined; None if a row is missing."""
    pieces: list[Piece] = []
    for table, length, begin, end in ranges:
        cached = length - (end - begin)
        if cached:
            blocks = table[: -(-cached // valid.block_size)]
            if not all(here.all() for here in valid.there(names, blocks, cached).values()):
                return None
            pieces += [(True, first, behind) for _, first, behind in slot_runs(blocks, valid.block_size, 0, cached)]
        if begin < end:
            pieces.append((False, begin, end))
    return pieces


def join_pieces(flat: torch.Tensor, pieces: Sequence[Piece], new: torch.Tensor, count: int) -> torch.Tensor:
    """Return pieces of cached and new rows of one name, one after another in new memory. All are in host memory.

    `flat` is `[num_blocks * block_size, *features]`. `count`, the number of rows of all pieces, is at least one.
    """
    out, new = empty((count, *flat.shape[1:]), flat.dtype, flat.device), new.detach()
    return torch.cat([(flat if cached else new)[begin:end] for cached, begin, end in pieces], out=out)
