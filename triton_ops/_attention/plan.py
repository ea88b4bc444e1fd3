"""The launch that builds a step's plan: the live tiles of each sequence and a balanced list of decode work."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._core.cache import LaunchCache, aligned
from .._core.launch import Launch, current_stream, flags, numbers
from .arguments import PlanOptions
from .constants import next_power_of_2
from .layout import MIN_SPLIT_TILES, TILE_KEYS, PlanShape
from .predicate import Mask

FillPlan = Callable[..., None]
"""A function of a plan and the tensors of its batch that fills the plan."""


def build_plan(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor | None,
    block_size: int,
    options: PlanOptions,
    target_items: int,
    out: torch.Tensor | None = None,
) -> FillPlan:
    """Return the function that fills plans for batches of this shape: `fill(plan, *batch)`, on the device.

    Args:
        block_tables: The block tables of a batch, as for `pc.attention_plan`.
        seq_lens: `[num_seqs]` int32, the tokens of each sequence.
        query_start_loc: `[num_seqs + 1]` int32, the first row of each sequence's queries.
        query_positions: The positions of the queries; None: the last positions of each sequence.
        block_size: Token slots of a block.
        options: The options of the plan.
        target_items: Approximate number of work items.
        out: A plan that the function will fill. Only its address matters, because kernels are compiled for alignment.
            None: new tensors, which are aligned.
    """
    shape = PlanShape.of(block_tables, block_size)
    has_positions, heads, strides = query_positions is not None, 1, (block_tables.stride(0), 0)
    if block_tables.dim() == 3:
        heads, strides = block_tables.shape[1], (block_tables.stride(0), block_tables.stride(1))
    compiled_for = (options.decode_queries, flags(options.mask), has_positions, heads, block_size)
    is_aligned = aligned(out, block_tables, seq_lens, query_start_loc, query_positions)
    kind = (compiled_for, is_aligned, block_tables.device)
    tiles, items = _launches.get_or(kind, (), lambda: _build_launches(*compiled_for, is_aligned))
    own, programs = (*numbers(options.mask), options.key_begin), (shape.num_rows, 1, 1)
    tiles_numbers = (shape.num_rows, shape.max_tiles, shape.max_items, *own, *strides)
    items_numbers = (shape.num_rows, target_items, shape.max_items - shape.num_rows, *own)

    def fill(
        plan: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        query_positions: torch.Tensor | None,
    ) -> None:
        if not shape.num_rows:
            plan.zero_()
            return
        stream = None if plan.is_cpu else current_stream()
        positions = seq_lens if query_positions is None else query_positions
        tiles((plan, block_tables, seq_lens, query_start_loc, positions), stream, programs, tiles_numbers)
        items((plan,), stream, programs, items_numbers)

    return fill


_launches: LaunchCache[tuple[Launch, Launch]] = LaunchCache()


def _build_launches(
    decode_queries: int,
    mask_flags: tuple[bool, ...],
    has_positions: bool,
    table_heads: int,
    block_size: int,
    is_aligned: bool,
) -> tuple[Launch, Launch]:
    """Return the launches of the two kernels, which serve any numbers of sequences and blocks."""
    from ..kernels.plan import _plan_items_kernel, _plan_tiles_kernel

    mask = dict(zip(Mask._fields[-len(mask_flags) :], mask_flags, strict=True))
    # A tile begins at most this far after the start of a block.
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
        Launch(_plan_tiles_kernel, tiles, same_alignment=is_aligned),
        Launch(_plan_items_kernel, items, num_warps=1, same_alignment=is_aligned),
    )


@dataclass(frozen=True, slots=True)
class Cached:
    """Tensors that are cached with a plan, as long as it lives.

    `derived` holds what the layers of a step share besides the plan, made from the same batch. The method `fill` of an
    entry brings it up to date with a batch of the same shapes. A captured graph may read the tensors of an entry whose
    `is_captured` is set, so a refresh of the plan fills them in place.
    """

    parts: dict[object, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # memory, by its purpose
    derived: dict[object, Any] = field(default_factory=dict)


_cached: dict[int, tuple[weakref.ref[torch.Tensor], Cached]] = {}


def cached_with(plan: torch.Tensor) -> Cached:
    """Return the tensors cached with a plan. Plans are found by identity, because tensors compare by elements."""
    key = id(plan)
    found = _cached.get(key)
    if found is not None and found[0]() is plan:
        return found[1]
    cached = Cached()
    _cached[key] = weakref.ref(plan, lambda _: _cached.pop(key, None)), cached
    return cached


def refresh_cached(
    plan: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """Refresh or drop the tensors that were derived from a plan's batch, after the plan itself was refreshed."""
    derived = cached_with(plan).derived
    for key, entry in [*derived.items()]:
        if entry.is_captured:
            entry.fill(block_tables, seq_lens, query_start_loc)
        else:
            del derived[key]
