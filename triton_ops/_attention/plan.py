"""Builds a step's plan on the device: the live tiles of each sequence and a balanced list of decode work."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .._dispatch import LaunchCache, aligned
from .._launch import Launch, current_stream, flags, numbers
from .call import PlanCall, PlanOptions
from .constants import next_power_of_2
from .layout import MIN_SPLIT_TILES, TILE_KEYS, PlanShape
from .predicate import Mask


def launch_plan(
    plan: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor | None,
    block_size: int,
    options: PlanOptions,
    target_items: int,
) -> None:
    """Fills `plan` on the device with about `target_items` work items; two launches, no synchronization."""
    shape = PlanShape.of(block_tables, block_size)
    assert plan.numel() == shape.size
    assert plan.dtype == torch.int32
    if shape.num_rows == 0:
        plan.zero_()
        return
    grid, max_items = (shape.num_rows, 1, 1), shape.max_items
    positions = seq_lens if query_positions is None else query_positions
    table_heads = block_tables.shape[1] if block_tables.dim() == 3 else 1
    is_aligned = aligned(plan, block_tables, seq_lens, query_start_loc, positions)
    compiled_for = (options.decode_queries, flags(options.mask), query_positions is not None, table_heads, block_size)
    kind = (compiled_for, is_aligned, plan.device)
    tiles, items = _launches.get_or(kind, (), lambda: _build_launches(*compiled_for, is_aligned))
    stream = None if plan.is_cpu else current_stream()
    own = (*numbers(options.mask), options.key_begin)
    strides = (block_tables.stride(0), block_tables.stride(1) if block_tables.dim() == 3 else 0)
    lengths = (shape.num_rows, shape.max_tiles, max_items)
    tiles((plan, block_tables, seq_lens, query_start_loc, positions), stream, grid, (*lengths, *own, *strides))
    items((plan,), stream, grid, (shape.num_rows, target_items, max_items - shape.num_rows, *own))


_launches: LaunchCache[tuple[Launch, Launch]] = LaunchCache()


def _build_launches(
    decode_queries: int,
    mask_flags: tuple[bool, ...],
    has_positions: bool,
    table_heads: int,
    block_size: int,
    is_aligned: bool,
) -> tuple[Launch, Launch]:
    from ..kernels.plan import _plan_items_kernel, _plan_tiles_kernel

    mask = dict(zip(Mask._fields[-len(mask_flags) :], mask_flags, strict=True))
    # A tile begins at most so far behind the beginning of a block.
    offset = block_size - math.gcd(block_size, TILE_KEYS)
    sub = next_power_of_2((offset + TILE_KEYS - 1) // block_size + 1)
    tiles = {
        **mask,
        "DECODE_Q": decode_queries,
        "POSITIONS": has_positions,
        "TABLE_HEADS": table_heads,
        "BLOCK_SIZE": block_size,
        "BLOCK_T": max(16, min(128, 1024 // sub)),
        "SUB": sub,
    }
    items = {**mask, "DECODE_Q": decode_queries, "MIN_TILES": MIN_SPLIT_TILES, "BLOCK_S": 128}
    return (
        Launch(_plan_tiles_kernel, tiles, reusable=is_aligned),
        Launch(_plan_items_kernel, items, num_warps=1, reusable=is_aligned),
    )


class Refreshed(Protocol):
    """What the layers of a step share besides a plan, made from the same batch."""

    is_captured: bool
    """Whether a captured graph may read it: it is then filled anew, in place, when the plan is refreshed."""

    def fill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Brings it up to date with a batch of the same shapes."""


@dataclass(frozen=True, slots=True)
class Cached:
    """What is cached with a plan, as long as it lives."""

    parts: dict[object, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # memory, by what it is for
    derived: dict[object, Refreshed] = field(default_factory=dict)  # from the plan's batch, until it is refreshed


_cached: dict[int, tuple[weakref.ref[torch.Tensor], Cached]] = {}


def cached_with(plan: torch.Tensor) -> Cached:
    """What is cached with a plan; tensors compare by elements, so it is found by identity."""
    key = id(plan)
    found = _cached.get(key)
    if found is not None and found[0]() is plan:
        return found[1]
    cached = Cached()
    _cached[key] = weakref.ref(plan, lambda _: _cached.pop(key, None)), cached
    return cached


def refresh_cached(call: PlanCall, plan: torch.Tensor) -> None:
    """Brings what is cached with a plan up to date, after the plan itself."""
    derived = cached_with(plan).derived
    for key, entry in [*derived.items()]:
        if entry.is_captured:
            entry.fill(call.block_tables, call.seq_lens, call.query_start_loc)
        else:
            del derived[key]
