"""Rows of named tensors by slot: moved by plain copies where host memory allows it, by kernels elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
from ..runs import Slots, ascending, find_runs
from ..table import Ids
from .host_copy import Range, find_pieces, join_pieces, worth_copies, write_rows
from .named_tensors import Entry, Named
from .step_slots import StepSlots
from .valid_rows import Mask, ValidRows


class MissingRowsError(LookupError):
    """Rows of a name were asked for that no step stored, or whose blocks have had other content since.

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
    """What a `TensorCache` keeps, without requests: every slot and block that it is given is in range.

    Args:
        entries: Names and their rows, which come and go.
        valid: Which slots hold a row of which name.
        device: Where the rows are kept.
    """

    def __init__(self, entries: Mapping[str, Entry], valid: ValidRows, device: torch.device) -> None:
        self.entries = entries
        self.valid = valid
        self._device = device
        self._swapped: dict[int, tuple[Named, dict[str, Mask]]] = {}
        self._written: torch.cuda.Event | None = None

    def require(self, names: Iterable[str]) -> None:
        """Raises KeyError for a name that is not cached."""
        for name in names:
            if name not in self.entries:
                raise KeyError(f"names: got {name!r}, needs one of {', '.join(self.entries) or 'none'}")

    def there(self, names: Sequence[str] | None, table: Ids, count: int) -> dict[str, Mask]:
        """Per name, which of the first tokens of a block table have a row; without names, of those that have any."""
        self.require(names or ())
        blocks = table[: -(-count // self.valid.block_size)]
        there = self.valid.there(self.entries if names is None else names, blocks, count)
        if names is None and count:
            there = {name: here for name, here in there.items() if here.any()}
        return there

    def write(self, slots: StepSlots, new: Named) -> None:
        """See `TensorCache.write`."""
        if slots.runs is not None:
            self.valid.clear_spans(slots.spans)
        else:
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
        if slots.runs is not None:
            self.valid.mark_spans(new, slots.spans)
        else:
            self.valid.mark(new, slots.kept)

    def on_host(self, new: Named) -> bool:
        """Whether rows and their cache are all where plain copies serve; waits for what a device still writes there."""
        for name, tensor in new.items():
            if self.entries[name].flat is None or not tensor.is_cpu:
                return False
        if self._written is not None:
            self._wait()
        return True

    def _scatter(self, new: Named, index: torch.Tensor) -> None:
        for device in {tensor.device for tensor in new.values()}:  # one launch for each
            some = {name: tensor.detach() for name, tensor in new.items() if tensor.device == device}
            if device.type == "cpu":
                self._wait()
            scatter_slots_list(list(some.values()), [self.entries[name].rows for name in some], index)
            if device.type == "cuda" and self._device.type == "cpu":
                self._written = torch.cuda.Event()
                self._written.record(torch.cuda.current_stream(device))

    def read(self, slots: StepSlots, names: Sequence[str]) -> Named:
        """See `TensorCache.read`."""
        self.require(names)
        if not self.valid.holds(names, slots.spans if slots.runs is not None else ascending(find_runs(slots.kept))):
            raise MissingRowsError(f"{', '.join(names)}: a row of the step's slots is missing")
        self._wait()
        runs, entries = slots.runs, [self.entries[name] for name in names]
        if runs and slots.low >= 0 and all(entry.flat is not None for entry in entries):
            pieces = [(True, first, end) for _, first, end in runs]
            if all(worth_copies(len(runs), slots.count * entry.row_bytes) for entry in entries):
                read = [join_pieces(e.flat, pieces, e.flat, slots.count, e.row_bytes) for e in entries]  # type: ignore[arg-type]
                return dict(zip(names, read, strict=True))
        return dict(zip(names, gather_slots_list([e.rows for e in entries], slots.index), strict=True))

    def gather(self, names: Sequence[str], slots: Slots, device: str | torch.device | None) -> list[torch.Tensor]:
        """Rows in slots, zeros for one that is -1."""
        self._wait()
        if not names:
            return []
        return gather_slots_list([self.entries[name].rows for name in names], torch.from_numpy(slots), device)

    def by_copies(self, names: Sequence[str], ranges: Sequence[Range], new: Named) -> list[torch.Tensor] | None:
        """Rows of names that the host can copy, and new ones; None where a kernel moves them or one is missing."""
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
            joined.append(join_pieces(entry.flat, pieces, new.get(name, entry.flat), count, entry.row_bytes))
        return joined

    def join(
        self,
        new: Named,
        tables: Sequence[Ids],
        lengths: Sequence[int],
        query_start_loc: npt.NDArray[np.integer],
        positions: npt.NDArray[np.integer] | None,
    ) -> list[torch.Tensor]:
        """Rows of whole requests out of block tables, and the new ones at their positions or else at the ends."""
        self._wait()
        grid = np.full((len(tables), max(len(table) for table in tables)), -1, np.int32)
        for row, table in zip(grid, tables, strict=True):
            row[: len(table)] = table
        return join_prefix_list(
            [self.entries[name].rows for name in new],
            torch.from_numpy(grid),
            torch.tensor(lengths),
            [rows.detach() for rows in new.values()],
            torch.from_numpy(np.require(query_start_loc, np.int64, ["C", "W"])),
            sum(lengths),
            None if positions is None else torch.from_numpy(np.require(positions, np.int64, ["C", "W"])),
        )

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies the rows of blocks to other blocks: (source, target) pairs, one after the other."""
        self._wait()
        for source, target in pairs:
            if self.entries:
                ids = (torch.tensor([block], device=self._device) for block in (source, target))
                copy_blocks_list([entry.rows for entry in self.entries.values()], *ids)
            self.valid.set_bits(target, self.valid.bits_of(source))

    def swap_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Keeps the rows of blocks, (block, host slot) pairs, until they are swapped in."""
        self._wait()
        for block, slot in pairs:
            index = torch.tensor([block])
            rows = gather_blocks_list([entry.rows for entry in self.entries.values()], index) if self.entries else []
            kept = {name: row.cpu() for name, row in zip(self.entries, rows, strict=True)}
            self._swapped[slot] = kept, self.valid.bits_of(block)

    def swap_in(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Brings rows back, (host slot, block) pairs; of names that have gone since, none."""
        self._wait()
        for slot, block in pairs:
            rows, bits = self._swapped.pop(slot, ({}, {}))
            known = [name for name in rows if name in self.entries]
            if known:
                targets = [self.entries[name].rows for name in known]
                scatter_blocks_list([rows[name] for name in known], targets, torch.tensor([block]))
            self.valid.set_bits(block, bits)

    def _wait(self) -> None:
        """Waits for what a device still writes to host memory."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None
