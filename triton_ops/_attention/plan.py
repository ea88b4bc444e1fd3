"""The launch that builds a step's plan: the live tiles of each sequence and a balanced list of decode work."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._core.cache import aligned, cached
from .._core.launch import Launch, constants, current_stream, flags, numbers
from .arguments import key_begin_of, mask_of, table_heads, table_strides
from .constants import next_power_of_2
from .layout import MIN_SPLIT_TILES, TILE_KEYS, PlanShape
from .predicate import Mask

FillPlan = Callable[..., torch.Tensor]
"""`fill(args, plan=None)` fills `plan`, or a new plan, for a call with the arguments `args`, and returns the plan."""


def build_plan(args: Any, decode_queries: int, target_items: int, out: torch.Tensor | None = None) -> FillPlan:
    """Return the function that fills plans for batches of this shape: `fill(args, plan=None)`, on the device.

    Args:
        args: The arguments of an attention operator or of `attention_plan`.
        decode_queries: Sequences with at most this many queries are decoded from the plan's work list.
        target_items: Approximate number of work items.
        out: A plan that the function will fill. Only its address matters, because kernels are compiled for alignment.
            None: new tensors, which are aligned.
    """
    tables, positions, block_size = args.block_tables, args.query_positions, args.block_size
    shape = PlanShape.of(tables, block_size)
    mask, heads = mask_of(args), table_heads(tables)
    is_aligned = aligned(out, tables, args.seq_lens, args.query_start_loc, positions)
    has_positions = positions is not None
    tiles, items = _build_launches(
        decode_queries, Mask(0, 0, *flags(mask)), has_positions, heads, block_size, is_aligned, tables.device
    )
    own, programs, size = (*numbers(mask), key_begin_of(args)), (shape.num_rows, 1, 1), shape.size
    tiles_numbers = (shape.num_rows, shape.max_tiles, shape.max_items, *own, *table_strides(tables))
    items_numbers = (shape.num_rows, target_items, shape.max_items - shape.num_rows, *own)

    def fill(args: Any, plan: torch.Tensor | None = None) -> torch.Tensor:
        if plan is None:
            plan = torch.empty(size, dtype=torch.int32, device=args.block_tables.device)
        if not shape.num_rows:
            return plan.zero_()
        stream = None if plan.is_cpu else current_stream()
        seq_lens, positions = args.seq_lens, args.query_positions
        batch = (args.block_tables, seq_lens, args.query_start_loc, seq_lens if positions is None else positions)
        tiles((plan, *batch), stream, programs, tiles_numbers)
        items((plan,), stream, programs, items_numbers)
        return plan

    return fill


@cached
def _build_launches(
    decode_queries: int,
    mask: Mask,
    has_positions: bool,
    num_tables: int,
    block_size: int,
    is_aligned: bool,
    device: torch.device,
) -> tuple[Launch, Launch]:
    """Return the launches of the two kernels on a device, which serve any numbers of sequences and blocks."""
    from ..kernels.plan import _plan_items_kernel, _plan_tiles_kernel

    # A tile begins at most this far after the start of a block.
    offset = block_size - math.gcd(block_size, TILE_KEYS)
    sub = next_power_of_2((offset + TILE_KEYS - 1) // block_size + 1)
    tiles = {
        **constants(mask),
        "DECODE_Q": decode_queries,
        "POSITIONS": has_positions,
        "TABLE_HEADS": num_tables,
        "BLOCK_SIZE": block_size,
        "BLOCK_T": max(16, min(128, 1024 // sub)),
        "SUB": sub,
    }
    items = {**constants(mask), "DECODE_Q": decode_queries, "MIN_TILES": MIN_SPLIT_TILES, "BLOCK_S": 128}
    return (
        Launch(_plan_tiles_kernel, tiles, same_alignment=is_aligned),
        Launch(_plan_items_kernel, items, num_warps=1, same_alignment=is_aligned),
    )


_cached: dict[int, tuple[weakref.ref[torch.Tensor], dict[object, Any]]] = {}


def cached_with(plan: torch.Tensor) -> dict[object, Any]:
    """Return what is cached with a plan, as long as the plan lives: memory for results, and what layers share.

    Plans are found by identity, because tensors compare by elements.
    """
    key = id(plan)
    found = _cached.get(key)
    if found is not None and found[0]() is plan:
        return found[1]
    cached: dict[object, Any] = {}
    _cached[key] = weakref.ref(plan, lambda _: _cached.pop(key, None)), cached
    return cached


def refresh_cached(plan: torch.Tensor, args: Any) -> None:
    """Refresh or drop the entries cached with a plan, after a call of `attention_plan` refreshed the plan.

    An entry that was made from the plan's batch has a method `fill`. The method updates the entry for a batch of the
    same shapes. If its `is_captured` is set, a captured graph may read its tensors, so they are filled in place.
    Other such entries are dropped.
    """
    cached = cached_with(plan)
    for key, entry in [*cached.items()]:
        if not hasattr(entry, "fill"):  # memory for results, which does not depend on the batch
            continue
        if entry.is_captured:
            entry.fill(args)
        else:
            del cached[key]
