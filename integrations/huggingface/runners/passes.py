"""Metadata of one forward pass, of packed rows or of a decode step, on each device that holds layers.

The buffers of decode steps keep their addresses, so that a captured graph can read them again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from .... import triton_ops  # noqa: F401  registers torch.ops.pc
from ....triton_ops._core.runtime import KERNELS_ON_CPU

ALIGNMENT = 16  # bytes; Triton compiles faster kernels for tensors that begin at multiples of it


Metadata = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The tensors of a pass that operators read for one group of layers, on one device, in the order of their arguments.

First comes `slot_mapping [num_tokens]` int64, in which -1 writes nothing. The others are int32: `block_tables
[num_seqs, max_blocks]`, `seq_lens [num_seqs]` after the pass, and `query_start_loc [num_seqs + 1]`.
"""


class Pass:
    """State shared by the layers of one forward pass."""

    max_query_len: int  # upper bound of the queries of a sequence
    max_seq_len: int | None  # upper bound of the lengths; None: the width of the block tables bounds them

    def __init__(self) -> None:
        self._plans: dict[tuple[torch.device, int, int], torch.Tensor] = {}
        self._planned: set[tuple[torch.device, int, int]] = set()

    def on(self, device: torch.device, group: int = 0) -> Metadata:
        """Return the metadata of a group of layers on `device`."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start a pass, in which `plan` builds each plan anew from the current metadata."""
        self._planned.clear()

    def plan(
        self, device: torch.device, block_size: int, window: int, num_kv_heads: int, group: int = 0
    ) -> torch.Tensor | None:
        """Return the plan of a group's layers with this window (0: none), built once a pass; None if none is needed."""
        if not needs_plan(device):
            return None
        key = (device, group, window)
        if key not in self._planned:
            arguments = (*self.on(device, group)[1:], block_size, True, window, 0, None, 0, num_kv_heads)
            if key in self._plans:
                torch.ops.pc.attention_plan(*arguments, out=self._plans[key])
            else:
                # The plan is written again later, and inference tensors cannot be written outside inference mode.
                with torch.inference_mode(False):
                    self._plans[key] = torch.ops.pc.attention_plan(*arguments)
            self._planned.add(key)
        return self._plans[key]


def needs_plan(device: torch.device) -> bool:
    """Return whether attention on `device` reads a plan. Attention on CPU tensors in PyTorch does not."""
    return device.type != "cpu" or KERNELS_ON_CPU


class PackedBatch(Pass):
    """The metadata of rows of any length, one after another.

    Args:
        groups: The slot mapping and the block tables of each group of layers.
        seq_lens: The lengths of the rows after the pass, `[num_seqs]` int32.
        query_lens: Their numbers of tokens in this pass, `[num_seqs]` int32.
    """

    def __init__(
        self, groups: Sequence[tuple[np.ndarray, np.ndarray]], seq_lens: np.ndarray, query_lens: np.ndarray
    ) -> None:
        super().__init__()
        query_start_loc = np.zeros(len(query_lens) + 1, np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])
        self._host = [torch.from_numpy(a) for a in (seq_lens, query_start_loc, *itertools.chain(*groups))]
        self._on_device: dict[torch.device, list[torch.Tensor]] = {}
        self.max_query_len = int(query_lens.max())
        self.max_seq_len = int(seq_lens.max())

    def on(self, device: torch.device, group: int = 0) -> Metadata:
        """Return the metadata of a group on `device`, copied there once."""
        if device not in self._on_device:
            self._on_device[device] = [t.to(device, non_blocking=True) for t in self._host]
        seq_lens, query_start_loc, *groups = self._on_device[device]
        return groups[2 * group], groups[2 * group + 1], seq_lens, query_start_loc


class DecodeBatch(Pass):
    """The metadata of one new token for each of up to `num_rows` sequences of up to `width` blocks in each group."""

    # Rows after the written ones are padding: token and position 0, slot -1, length 0, no queries.
    # Asynchronous copies to a GPU need page-locked host memory (`pinned`).

    def __init__(self, num_rows: int, width: int, pinned: bool, groups: int = 1) -> None:
        super().__init__()
        self.num_rows, self.width = num_rows, width
        self.max_query_len, self.max_seq_len = 1, None
        rows = (num_rows,)
        shapes = [(torch.int64, rows)] * 2 + [(torch.int32, rows), (torch.int32, (num_rows + 1,))]
        shapes += [(torch.int64, rows)] * groups  # slots
        self._layout: list[tuple[int, torch.dtype, tuple[int, ...]]] = []
        end = 0
        for dtype, shape in [*shapes, *[(torch.int32, (num_rows, width))] * groups]:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self._layout.append((start, dtype, shape))
            end = start + dtype.itemsize * int(np.prod(shape))
        with torch.inference_mode(False):
            self._staging = torch.zeros(end, dtype=torch.uint8, pin_memory=pinned)
        self._tables_begin = self._layout[-groups][0]
        host = [view.numpy() for view in self._views(self._staging)]
        self._tokens, self._positions, self._seq_lens, self._starts, *of_groups = host
        self._slots, self._tables = of_groups[:groups], of_groups[groups:]
        for array in of_groups:
            array[:] = -1
        self._written: list[list[np.ndarray | None]] = [[None] * num_rows for _ in range(groups)]
        self._num_written = 0
        self._on_device: dict[torch.device, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._copied: list[torch.cuda.Event] = []

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a buffer: tokens, positions, lengths, starts of queries, slots by group, tables by group."""
        return [
            buffer[start : start + dtype.itemsize * int(np.prod(shape))].view(dtype).view(shape)
            for start, dtype, shape in self._layout
        ]

    def write(
        self,
        tables: Sequence[Sequence[np.ndarray]],
        positions: np.ndarray,
        tokens: Sequence[int] | np.ndarray,
        slots: Sequence[np.ndarray],
    ) -> None:
        """Write the metadata of a step: the position and id of each sequence's new token, its table and slot by group.

        A table that is the same array as in the step before is not written again, so callers must not change arrays.
        """
        count = len(positions)
        for event in self._copied:  # copies of the previous step may still read this memory
            event.synchronize()
        if count != self._num_written:
            self._tokens[count:], self._positions[count:], self._seq_lens[count:] = 0, 0, 0
            self._starts[:] = np.minimum(np.arange(self.num_rows + 1), count)
            self._num_written = count
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._seq_lens[:count] = positions + 1
        end = self._tables_begin
        for group, (own, of_group) in enumerate(zip(tables, slots, strict=True)):
            self._slots[group][:count], self._slots[group][count:] = of_group, -1
            for index, table in enumerate(own):
                if table is not self._written[group][index]:
                    self._tables[group][index, : len(table)] = table  # columns after its end are never read
                    self._written[group][index] = table
                    end = len(self._staging)
        self._copied.clear()
        for device in self._on_device:
            self._copy(device, end)

    def _copy(self, device: torch.device, end: int) -> None:
        """Copy the first `end` bytes to a device."""
        buffer = self._on_device[device][0]
        if buffer is not self._staging:
            buffer[:end].copy_(self._staging[:end], non_blocking=True)
        if device.type == "cuda":
            self._copied.append(torch.cuda.current_stream(device).record_event())

    def _buffers(self, device: torch.device) -> list[torch.Tensor]:
        """Return the views of a device's buffer, allocated at its first use."""
        if device not in self._on_device:
            with torch.inference_mode(False):
                buffer = self._staging if device.type == "cpu" else torch.empty_like(self._staging, device=device)
            self._on_device[device] = (buffer, self._views(buffer))
            self._copy(device, len(self._staging))
        return self._on_device[device][1]

    def on(self, device: torch.device, group: int = 0) -> Metadata:
        """Return the metadata of a group on `device`, at the same addresses in every step."""
        _, _, seq_lens, starts, *of_groups = self._buffers(device)
        return of_groups[group], of_groups[group + len(self._slots)], seq_lens, starts

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and positions on `device`, each `[1, num_rows]` int64."""
        tokens, positions, *_ = self._buffers(device)
        return tokens[None], positions[None]
