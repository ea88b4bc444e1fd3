"""Copies of rows in host memory: one plain copy for each run of consecutive slots.

For a few rows Python and PyTorch around a copy cost more than the copy, so there is as little of both as possible.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from ...triton_ops._rows import memory
from ...triton_ops._rows.cpu import QUICK_BYTES, scatter_rows
from ..runs import ascending, slot_runs
from ..table import Ids
from .step_slots import StepSlots
from .valid_rows import ValidRows

PLAIN = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
}
"""What PyTorch copies bit by bit in every way of copying."""

Piece = tuple[bool, int, int]
"""Whether its rows are cached, and the range of slots or else of new rows."""

Range = tuple[Ids, int, int, int]
"""Block table of a request, its length, and which new rows are its last."""

_ALONE_BYTES = 1 << 20  # up to here more threads gain less than it takes to start them
_FEW_RUNS, _RUN_BYTES = 2, 1 << 20  # what several threads copy as well one by one as all at once


def worth_copies(num_runs: int, num_bytes: int) -> bool:
    """Whether runs of rows are best copied one by one."""
    return num_runs <= _FEW_RUNS or num_bytes >= _RUN_BYTES * num_runs or _alone(num_bytes)


def _alone(num_bytes: int) -> bool:
    return num_bytes <= _ALONE_BYTES or torch.get_num_threads() == 1


def _bare(rows: torch.Tensor) -> bool:
    """Whether the memory of rows is nothing but the rows."""
    return type(rows) is torch.Tensor and rows.is_contiguous() and not rows.is_neg()


def write_rows(rows: torch.Tensor, flat: torch.Tensor, slots: StepSlots, new: torch.Tensor, row_bytes: int) -> None:
    """Writes the rows of a step to their slots.

    Args:
        rows: `[num_blocks, block_size, *features]`, contiguous.
        flat: The same memory as `[num_blocks * block_size, *features]`.
        slots: At least one, in range.
        new: `[num_tokens, *features]` of the same dtype, in host memory.
        row_bytes: Of one of them.
    """
    runs, num_bytes = slots.runs, slots.count * row_bytes
    alone = _alone(num_bytes)
    if runs is None or not (alone or worth_copies(len(runs), num_bytes)):
        scatter_rows(new.detach(), rows, 2, slots.index, slots.low)
    elif alone and _bare(new):
        target, source = flat.data_ptr(), new.data_ptr()
        for begin, first, end in runs:
            ctypes.memmove(target + first * row_bytes, source + begin * row_bytes, (end - first) * row_bytes)
    else:
        new = new.detach()
        for begin, first, end in runs:
            flat[first:end].copy_(new[begin : begin + end - first])


def find_pieces(valid: ValidRows, names: Sequence[str], ranges: Iterable[Range]) -> list[Piece] | None:
    """What the rows of requests are put together from, in order; None where one of them is missing."""
    pieces: list[Piece] = []
    size = valid.block_size
    for table, length, begin, end in ranges:
        cached = length - (end - begin)
        if cached:
            blocks = table[: -(-cached // size)].tolist()
            runs = slot_runs(blocks, size, 0, cached)
            if min(blocks) < 0 or not valid.holds(names, ascending(runs)):
                return None
            pieces += [(True, first, behind) for _, first, behind in runs]
        if begin < end:
            pieces.append((False, begin, end))
    return pieces


def join_pieces(
    flat: torch.Tensor, pieces: Sequence[Piece], new: torch.Tensor, count: int, row_bytes: int
) -> torch.Tensor:
    """Cached rows and new ones of a name, one piece behind the other in fresh memory.

    Args:
        flat: `[num_blocks * block_size, *features]`.
        pieces: In range.
        new: `[num_tokens, *features]` of the same dtype, in host memory.
        count: Rows of all pieces, at least one.
        row_bytes: Of one of them.
    """
    shape = (count, *flat.shape[1:])
    if count * row_bytes >= QUICK_BYTES:
        out = memory.empty(shape, flat.dtype, flat.device)
    else:
        out = torch.empty(shape, dtype=flat.dtype, device=flat.device)
    if _bare(new) and _alone(count * row_bytes):
        target, sources = out.data_ptr(), (new.data_ptr(), flat.data_ptr())
        for cached, begin, end in pieces:
            length = (end - begin) * row_bytes
            ctypes.memmove(target, sources[cached] + begin * row_bytes, length)
            target += length
        return out
    new = new.detach()
    return torch.cat([(flat if cached else new)[begin:end] for cached, begin, end in pieces], out=out)
