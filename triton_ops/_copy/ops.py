"""Gather and scatter by block number or by slot.

A block number indexes the first dimension of a cache, and a slot the first two. PyTorch moves rows on the CPU. On a
device, a kernel moves them. The copy engine may do so if one side is host memory and the index is on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._core.checks import (
    INDEX_DTYPES,
    check_caches,
    check_reachable,
    check_rows,
    check_tensor,
    lowest_entry,
    on_host,
)
from . import cpu
from .launch import launch_move_rows
from .layout import flat_rows, row_bytes

if TYPE_CHECKING:
    from .runs import Run

BLOCKS, SLOTS = 1, 2
_INDEX = {BLOCKS: ("block_ids", "[n]"), SLOTS: ("slot_mapping", "[num_tokens]")}

RUN_BYTES = 1 << 20
"""The copy engine is used if contiguous runs have this many bytes or more on average. Issuing a copy takes about 10 us.
A bus of 50 GB/s moves half of these bytes in that time. The number is calculated, not measured.
"""


def new_rows(cache: torch.Tensor, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return an uninitialized result on `device`. In host memory, the result of a cache on a GPU is pinned."""
    if device.type == "cpu" and cache.is_cuda:
        return torch.empty(tuple(shape), dtype=cache.dtype, pin_memory=True)
    return cpu.empty(shape, cache.dtype, device)


def result_device(cache: torch.Tensor, index: torch.Tensor, device: torch.device | None) -> torch.device:
    """Return the device of gathered rows: the given one, else the index's accelerator, else the cache's device."""
    if device is not None:
        return device
    return index.device if index.is_cuda else cache.device


def copy_runs(packed: torch.Tensor, cache: torch.Tensor, runs: Sequence[Run], to_cache: bool) -> None:
    """Copy packed rows to or from runs of a cache, without synchronizing. Gathered rows outside all runs become 0."""
    if not to_cache and sum([end - first for _, first, end in runs]) < len(packed):
        packed.zero_()
    for begin, first, end in runs:
        here, there = packed[begin : begin + end - first], cache[first:end]
        if to_cache:
            there.copy_(here, non_blocking=True)
        else:
            here.copy_(there, non_blocking=True)


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
                    copy_runs(rows, flat, runs, to_cache)
                return
        index = index.to(device, non_blocking=True)
    index = index.contiguous()
    if to_cache:
        launch_move_rows(op, packed, caches, (1, leading), index.shape[0], target_index=index)
    else:
        launch_move_rows(op, caches, packed, (leading, 1), index.shape[0], source_index=index)


def move_rows(
    op: str,
    leading: int,
    caches: Sequence[torch.Tensor],
    index: torch.Tensor,
    sources: Sequence[torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> Sequence[torch.Tensor]:
    """Gather rows of caches, or scatter the rows of `sources` into caches, on any device; return the packed rows.

    Args:
        op: The operator's name, for errors; one that ends in _list has arguments caches and sources.
        leading: BLOCKS or SLOTS: the dimensions of a cache that an index counts.
        caches: Any strides.
        index: Block numbers or slots.
        sources: One for each cache; None: gather.
        device: Where gathered rows go; None: see `result_device`.
    """
    plural, (index_name, layout) = "s" if op.endswith("_list") else "", _INDEX[leading]
    check_caches(f"cache{plural}", caches)
    check_tensor(index_name, index, layout, INDEX_DTYPES)
    check_reachable(f"cache{plural}", caches[0], index, index_name)
    lowest = lowest_entry(index_name, index, math.prod(caches[0].shape[:leading]))
    if sources is None:
        place = result_device(caches[0], index, device)
        packed: Sequence[torch.Tensor] = [
            new_rows(cache, (index.shape[0], *cache.shape[leading:]), place) for cache in caches
        ]
    else:
        check_rows(f"source{plural}", sources, caches, index.shape[0], leading)
        check_reachable(f"source{plural}", sources[0], index, index_name)
        packed = sources
    if not on_host(caches[0], index, packed[0]):
        _move_on_device(op, packed, caches, leading, index, to_cache=sources is not None)
    else:
        for rows, cache in zip(packed, caches, strict=True):
            if sources is None:
                cpu.gather_rows(cache, leading, index, rows, lowest)
            else:
                cpu.scatter_rows(rows, cache, leading, index, lowest)
    return packed


def row_functions(op: str, leading: int) -> dict[str, Any]:
    """Return the functions `cpu` and `launch` of an operator that gathers or scatters rows.

    Args:
        op: The operator's name. One that ends in _list has arguments caches and sources, others cache and source.
        leading: As for `move_rows`.
    """
    several, (index_name, _) = op.endswith("_list"), _INDEX[leading]

    def run(args: Any) -> Any:
        caches, index = args.caches if several else [args.cache], getattr(args, index_name)
        if op.startswith("gather"):
            rows = move_rows(op, leading, caches, index, None, args.device)
            return rows if several else rows[0]
        move_rows(op, leading, caches, index, args.sources if several else [args.source])
        return None

    return {"cpu": run, "launch": run}


def empty_rows(
    cache: torch.Tensor, leading: int, index: torch.Tensor, device: torch.device | str | None
) -> torch.Tensor:
    """Return the result of a gather without data, for the operator's fake."""
    place = result_device(cache, index, None if device is None else torch.device(device))
    return cache.new_empty((index.shape[0], *cache.shape[leading:]), device=place)
