"""Gather and scatter by block number or by slot.

A block number indexes the first dimension of a cache, and a slot the first two. PyTorch moves rows on the CPU. On a
device, a kernel moves them. The copy engine may do so if one side is host memory and the index is on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core.checks import INDEX_DTYPES, check_caches, check_reachable, check_rows, check_tensor, lowest_entry, on_host
from . import cpu
from .launch import launch_move_rows
from .layout import flat_rows, row_bytes

BLOCKS, SLOTS = 1, 2
"""How many first dimensions of a cache an index counts."""

RUN_BYTES = 1 << 20
"""The copy engine is used if contiguous runs have this many bytes or more on average. Issuing a copy takes about 10 us.
A bus of 50 GB/s moves half of these bytes in that time. The number is calculated, not measured.
"""


def result_device(cache: torch.Tensor, index: torch.Tensor, device: torch.device | None) -> torch.device:
    """Return the device of gathered rows: the given one, else the index's accelerator, else the cache's device."""
    if device is not None:
        return device
    return index.device if index.is_cuda else cache.device


def _move_on_device(
    op: str,
    packed: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    leading: int,
    index: torch.Tensor,
    to_cache: bool,
) -> None:
    """Move rows by a kernel, or by the copy engine.

    The copy engine needs an index on the host. It moves the rows if host tensors are pageable, or if runs are long.
    """
    device = next((t.device for t in (*packed, *caches, index) if t.is_cuda), None)
    if device is not None and not index.is_cuda:
        hosted = [t for t in (*packed, *caches) if not t.is_cuda]
        flats = [flat_rows(cache, leading) for cache in caches]
        if hosted and all(flat is not None for flat in flats):
            from .runs import find_runs  # imported here because it needs numpy, which the kernel does not

            runs = find_runs(index.numpy())
            size = sum(row_bytes(tensor) for tensor in packed) * index.shape[0]
            if size >= RUN_BYTES * len(runs) * len(caches) or not all(t.is_pinned() for t in hosted):
                for rows, flat in zip(packed, flats, strict=True):
                    assert flat is not None
                    if not to_cache and sum([end - first for _, first, end in runs]) < len(rows):
                        rows.zero_()  # rows outside all runs
                    for begin, first, end in runs:
                        pair = flat[first:end], rows[begin : begin + end - first]
                        target, source = pair if to_cache else pair[::-1]
                        target.copy_(source, non_blocking=True)
                return
        index = index.to(device, non_blocking=True)
    index = index.contiguous()
    if to_cache:
        launch_move_rows(op, packed, caches, (1, leading), index.shape[0], target_index=index)
    else:
        launch_move_rows(op, caches, packed, (leading, 1), index.shape[0], source_index=index)


def tensors_of(args: Any, name: str) -> tuple[str, Sequence[torch.Tensor]]:
    """Return the name and the tensors of an operator's argument `name`, or of its list `name` + "s"."""
    if hasattr(args, name):
        return name, [getattr(args, name)]
    return f"{name}s", getattr(args, f"{name}s")


def move_rows(args: Any) -> Any:
    """Run an operator that gathers or scatters rows, on any device. `args` are named after the operator."""
    op, leading, index_name, layout = type(args).__name__, BLOCKS, "block_ids", "[n]"
    if hasattr(args, "slot_mapping"):
        leading, index_name, layout = SLOTS, "slot_mapping", "[num_tokens]"
    (cache_name, caches), index, gathers = tensors_of(args, "cache"), getattr(args, index_name), op.startswith("gather")
    packed: Sequence[torch.Tensor]
    check_caches(cache_name, caches)
    check_tensor(index_name, index, layout, INDEX_DTYPES)
    check_reachable(cache_name, caches[0], index, index_name)
    lowest = lowest_entry(index_name, index, math.prod(caches[0].shape[:leading]))
    if gathers:
        place = result_device(caches[0], index, args.device)
        pinned = place.type == "cpu" and caches[0].is_cuda
        packed = [cpu.empty((len(index), *cache.shape[leading:]), cache.dtype, place, pinned) for cache in caches]
    else:
        source_name, packed = tensors_of(args, "source")
        check_rows(source_name, packed, caches, index.shape[0], leading)
        check_reachable(source_name, packed[0], index, index_name)
    if not on_host(caches[0], index, packed[0]):
        _move_on_device(op, packed, caches, leading, index, to_cache=not gathers)
    else:
        for rows, cache in zip(packed, caches, strict=True):
            if gathers:
                cpu.gather_rows(cache, leading, index, rows, lowest)
            else:
                cpu.scatter_rows(rows, cache, leading, index, lowest)
    if not gathers:
        return None
    return packed[0] if cache_name == "cache" else packed


def empty_rows(
    cache: torch.Tensor, leading: int, index: torch.Tensor, device: torch.device | str | None
) -> torch.Tensor:
    """Return the result of a gather without data, for the operator's fake."""
    place = result_device(cache, index, None if device is None else torch.device(device))
    return cache.new_empty((index.shape[0], *cache.shape[leading:]), device=place)
