"""Chooses how rows travel: by kernel, or by copy engine where one side is host memory and the index is known here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .kernel import launch_move_rows
from .layout import row_bytes
from .runs import contiguous_runs

RUN_BYTES = 1 << 20
"""Mean bytes of a contiguous run from which on the copy engine serves: a copy takes some 10 us to issue, in which a
bus of 50 GB/s moves half of this. Arithmetic, not a sweep."""


def _flat(tensor: torch.Tensor, leading: int) -> torch.Tensor | None:
    """The tensor with one leading dimension, or None where its slots are not evenly spaced."""
    if leading == 1:
        return tensor
    if tensor.shape[0] > 1 and tensor.shape[1] > 1 and tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
        return None
    pitch = tensor.stride(1) if tensor.shape[1] > 1 else tensor.stride(0)
    return tensor.as_strided((tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]), (pitch, *tensor.stride()[2:]))


def copy_runs(packed: torch.Tensor, cache: torch.Tensor, runs: npt.NDArray[np.int64], to_cache: bool) -> None:
    """Copies run by run, without waiting, between packed rows and a cache with one leading dimension.

    Args:
        packed: `[num_rows, *row]`; rows of negative runs are zeroed when it is the target.
        cache: `[num_rows_of_cache, *row]`.
        runs: From `contiguous_runs`.
        to_cache: Direction.
    """
    for begin, first, length in runs.tolist():
        here = packed[begin : begin + length]
        if first < 0:
            if not to_cache:
                here.zero_()
        elif to_cache:
            cache[first : first + length].copy_(here, non_blocking=True)
        else:
            here.copy_(cache[first : first + length], non_blocking=True)


def move_rows(
    op: str,
    packed: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    leading: int,
    index: torch.Tensor,
    to_cache: bool,
) -> None:
    """Moves rows between packed tensors and caches, at least one of them or the index on an accelerator.

    Args:
        op: The operator's name, for errors.
        packed: Per cache `[num_rows, *row]`.
        caches: Cache tensors.
        leading: 1: index counts their first dimension; 2: it counts slots.
        index: `[num_rows]` on the accelerator, or on the host: then contiguous runs of at least RUN_BYTES in the mean
            go through the copy engine and so does pageable memory.
        to_cache: Direction.
    """
    device = next((t.device for t in (*packed, *caches, index) if t.is_cuda), None)
    if device is not None and not index.is_cuda:
        hosted = [t for t in (*packed, *caches) if not t.is_cuda]
        flats = [_flat(cache, leading) for cache in caches]
        if hosted and all(flat is not None for flat in flats):
            runs = contiguous_runs(index.numpy())
            size = sum(row_bytes(tensor, 1) for tensor in packed) * index.shape[0]
            if size >= RUN_BYTES * len(runs) * len(caches) or not all(t.is_pinned() for t in hosted):
                for rows, flat in zip(packed, flats, strict=True):
                    assert flat is not None
                    copy_runs(rows, flat, runs, to_cache)
                return
        index = index.to(device, non_blocking=True)
    index = index.contiguous()
    if to_cache:
        launch_move_rows(op, packed, caches, (1, leading), index.shape[0], target_index=index)
    else:
        launch_move_rows(op, caches, packed, (leading, 1), index.shape[0], source_index=index)
