"""The launch of an attention call: which kernels run, on which grids, with which constants.

Metadata alone decide it, so it is built once for all calls of a kind, such as all layers of a step. `lists.py` has the
launch of a call with lists of blocks. No kernel is compiled for the number of sequences or splits, or for a mix of
decodes and prefills. These are kernel arguments, so that `pc.warmup` can compile everything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._core.cache import aligned
from .._core.launch import Launch, current_stream, numbers
from .arguments import AttentionArgs, Result, decode_queries_of, key_begin_of, table_heads
from .constants import (
    Architecture,
    Tiles,
    architecture,
    decode_tiles,
    latent_tiles,
    next_power_of_2,
    prefill_tiles,
    programs_per_processor,
)
from .kernel_arguments import (
    NewResults,
    build_results,
    build_sum_launch,
    compiled_for,
    converts_codes,
    kernel_tensors,
    strides_of,
)
from .layout import DECODE_QUERIES, MIN_SPLIT_TILES, TILE_KEYS, PlanShape
from .lists import build_lists
from .plan import FillPlan, build_plan, cached_with

# Batch-invariant mode: keys per split, whatever the batch. Longer contexts are summed from splits of this length.
INVARIANT_SPLIT_KEYS = 8192
MAX_PREFILL_SPLITS = 16

# Replaces sinks of -inf: its weight is 0 beside any score, so results are those without a sink.
_LEAST_SINK = -1e30

PartsShape = tuple[int, int, int]
"""The shape of partial results: rows, heads of each, and columns."""


def build_attention(
    args: AttentionArgs, out_dtype: torch.dtype | None = None, tiled: bool = False
) -> Callable[[AttentionArgs], Any]:
    """Return the launch for checked calls of this kind; it returns out, or (out, lse) if the call wants the lse.

    Args:
        args: The call, or a part of one.
        out_dtype: The dtype of out; None: that of the query.
        tiled: Whether sequences with few queries are tiled like prefills too, instead of decoded from the work list.
    """
    args = args.with_rows()
    if 0 in args.query.shape[:2] or 0 in args.block_tables.shape:
        return functools.partial(_give_empty, build_results(args, out_dtype))
    launch = build_lists(args) if args.query_blocks is not None else _build_table_launch(args, out_dtype, tiled)
    return launch if args.sinks is None else functools.partial(_with_sinks, launch)


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """The kernels of a call. Sequences with few queries are decoded from a work list; all others are prefills."""

    fill_plan: FillPlan
    target_items: int  # work items of a plan made for this call, roughly
    convert_codes: bool  # whether kernels read float8 as uint8, for bit operations
    with_lse: bool
    decode: Launch | None  # None where there can be no decode
    decode_parts: PartsShape | None  # None where no sequence is split
    prefill: Launch | None
    prefill_parts: PartsShape | None
    merge: Launch  # of splits
    new_results: NewResults
    nothing: torch.Tensor  # empty float32 for absent parts, because kernels are compiled for the types of arguments

    def __call__(self, args: AttentionArgs) -> Any:
        """Launch the kernels for decodes and for prefills, and the one that sums their splits."""
        query, starts = args.query, args.query_start_loc
        out, lse = self.new_results(query)
        plan = self.fill_plan(args) if args.plan is None else args.plan
        stream = None if query.is_cpu else current_stream()
        before, behind = kernel_tensors(args, out, self.convert_codes)
        no_parts = (self.nothing, self.nothing)
        decoded = tiled = None
        if self.decode is not None:
            if self.decode_parts is not None:
                decoded = _parts(args.plan, "decode", stream, self.decode_parts, plan.device)
            self.decode((*before, out, lse, *(decoded or no_parts), *behind, plan), stream)
        if self.prefill is not None:
            if self.prefill_parts is not None:
                tiled = _parts(args.plan, "prefill", stream, self.prefill_parts, plan.device)
            self.prefill((*before, out, lse, *(tiled or no_parts), *behind, plan), stream)
        if parts := decoded or tiled:
            self.merge((out, lse, *parts, *(tiled or parts), starts, plan, args.sinks), stream)
        return (out, lse) if self.with_lse else out


def _parts(plan: torch.Tensor | None, name: str, stream: int | None, shape: PartsShape, device: torch.device) -> Result:
    """Return memory for partial results and their lse, cached with a given plan: the next layer overwrites it."""
    # Each stream has its own memory, because its layers may run at the same time. Memory of other shapes is kept,
    # because a captured graph may use it.
    cached, kind = {} if plan is None else cached_with(plan), (name, stream, shape)
    found: Result | None = cached.get(kind)
    if found is None:
        found = cached[kind] = (
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape[:2], dtype=torch.float32, device=device),
        )
    return found


def _with_sinks(launch: Callable[[AttentionArgs], Any], args: AttentionArgs) -> Any:
    """Run a call whose sinks may be -inf. Kernels get a finite number instead, because -inf gives NaN without keys."""
    assert args.sinks is not None
    found = launch(args._replace(sinks=args.sinks.float().clamp(min=_LEAST_SINK)))
    if args.with_lse:
        found[1].masked_fill_(found[1] <= _LEAST_SINK / 2, -math.inf)
    return found


def _give_empty(new_results: NewResults, args: AttentionArgs) -> Any:
    """Return the results of a call without keys.

    out is 0. The lse is -inf. With sinks, it is the sink in rows that belong to a sequence.
    """
    out, lse = new_results(args.query)
    out.zero_()
    if not args.with_lse:
        return out
    lse.fill_(float("-inf"))
    if args.sinks is not None:
        rows = torch.arange(out.shape[0], device=out.device) < args.query_start_loc[-1]
        lse.copy_(torch.where(rows[:, None], args.sinks.float()[None], lse))
    return out, lse


def wanted_items(arch: Architecture, programs_per_item: int) -> int:
    """Return how many work items of a decode keep every processor busy."""
    return max(1, programs_per_processor(arch.name) * arch.num_processors // programs_per_item)


def _build_table_launch(args: AttentionArgs, out_dtype: torch.dtype | None, tiled: bool) -> AttentionLaunch:
    """Return the launch of a call without lists of blocks; the arguments are those of `build_attention`."""
    num_tokens, num_heads, _ = args.query.shape
    num_seqs, num_kv_heads = args.seq_lens.shape[0], args.key_cache.shape[2]
    group, num_tables = num_heads // num_kv_heads, table_heads(args.block_tables)
    arch, plan_queries = architecture(args.query.device), 0 if tiled else decode_queries_of(args)
    shape = PlanShape.of(args.block_tables, args.block_size)
    longest = num_tokens if args.max_query_len is None else min(num_tokens, args.max_query_len)
    decode, prefill = _tiles(args, arch, longest)
    query_tiles, max_q = num_tokens * group // prefill.block_m + num_seqs, max(1, min(longest, DECODE_QUERIES))
    # If all other sequences had `longest` queries and the remaining one still exceeds DECODE_QUERIES, there are no
    # decodes. Padding may make a sequence seem longer than it is. A short sequence that is tiled has the same result.
    prefill_only = args.tree_mask is not None or num_tokens - (num_seqs - 1) * longest > DECODE_QUERIES
    decode_queries = 0 if prefill_only else plan_queries
    prefill_programs = (query_tiles, num_kv_heads * prefill.value_splits)
    idle = 2 * arch.num_processors // (prefill_programs[0] * prefill_programs[1])
    decode_splits, prefill_splits = _splits(args, shape, decode_queries, longest, idle)
    # A decode's work item serves all KV heads, or the KV head of its table.
    item_programs = num_kv_heads // num_tables * -(-max_q * group // decode.block_m) * decode.value_splits
    target_items = wanted_items(arch, item_programs)
    decode_launch = decode_parts = prefill_launch = prefill_parts = None
    if decode_splits:
        items = min(shape.max_items, shape.num_rows + target_items, shape.num_rows * decode_splits)
        limits = (decode_queries, max_q, decode_splits)
        decode_launch = _build_attention_launch(args, shape, decode, True, (items, item_programs, 1), limits)
        if decode_splits > 1:
            decode_parts = (shape.max_items * max_q, num_heads // num_tables, args.value_cache.shape[3])
    if prefill_splits:
        programs, limits = (*prefill_programs, prefill_splits), (decode_queries, max_q, prefill_splits)
        prefill_launch = _build_attention_launch(args, shape, prefill, False, programs, limits)
        if prefill_splits > 1:
            prefill_parts = (prefill_splits * num_tokens, num_heads, args.value_cache.shape[3])
    # The sum takes the splits of decodes if prefills have none, otherwise those of all tokens.
    by_sequence = int(decode_queries > 0 and prefill_splits <= 1)  # triton 3.6 cannot interpret a bool
    rows = num_seqs * max_q if by_sequence else num_tokens
    summed = (num_seqs, num_tokens, decode_queries, max_q, max(1, prefill_splits), by_sequence)
    return AttentionLaunch(
        fill_plan=build_plan(args, plan_queries, target_items),
        target_items=target_items,
        convert_codes=converts_codes(args),
        with_lse=args.with_lse,
        decode=decode_launch,
        decode_parts=decode_parts,
        prefill=prefill_launch,
        prefill_parts=prefill_parts,
        merge=build_sum_launch(args, rows, max(decode_splits, prefill_splits), summed, num_tables),
        new_results=build_results(args, out_dtype),
        nothing=args.query.new_empty(0, dtype=torch.float32),
    )


def _tiles(args: AttentionArgs, arch: Architecture, longest: int) -> tuple[Tiles, Tiles]:
    """Return the tiles of a decode and of a prefill."""
    query, group = args.query, args.query.shape[1] // args.key_cache.shape[2]
    quantized, has_tree = args.key_cache.dtype != query.dtype, args.tree_mask is not None
    is_modified = not args.terms.PLAIN
    spare_registers = _has_segments(args) or has_tree or is_modified
    rows = max(1, min(longest, DECODE_QUERIES)) * group
    if args.is_latent:
        row = (query.shape[2], args.value_cache.shape[3], query.element_size())
        narrow = args.block_size * max(1, args.key_cache.stride(1)) < 1 << 31
        few = latent_tiles(arch.name, *row, rows, quantized, True, narrow)
        return few, latent_tiles(arch.name, *row, 64, quantized, False, narrow)
    kind = (max(query.shape[2], args.value_cache.shape[3]), query.element_size())
    decode = decode_tiles(arch.name, *kind, rows, quantized, is_modified)
    # A step over two tiles needs eight blocks at most, rows found by shifts, and positions that follow from lengths.
    two_tiles = args.block_size == 16 and group == next_power_of_2(group)
    two_tiles = two_tiles and args.query_positions is None and not args.batch_invariant
    prefill = prefill_tiles(arch.name, *kind, spare_registers, quantized, two_tiles)
    if has_tree:
        # The mask takes a register for each score, which wider tiles lack. Without max_registers, the compiler would
        # spill to leave registers for a second program.
        few = decode_tiles(arch.name, *kind, longest * group, quantized)
        tiles = few if longest * group <= prefill.block_m // 2 else prefill
        prefill = replace(tiles, block_n=min(tiles.block_n, 32), max_registers=255)
    return decode, prefill


def _has_segments(args: AttentionArgs) -> bool:
    """Return whether queries of one tile may be far apart, with separate windows.

    The kernel then visits the union of these windows, segment by segment.
    """
    return args.query_positions is not None and args.mask.BOUNDED and args.tree_mask is None


def _splits(args: AttentionArgs, shape: PlanShape, decode_queries: int, longest: int, idle: int) -> tuple[int, int]:
    """Return how many splits the keys of a decode and of a prefill have: 0 if the call cannot have one.

    Args:
        args: The call.
        shape: The shape of its plan.
        decode_queries: Sequences with more queries are prefills. 0: all are.
        longest: Most queries of a sequence.
        idle: The number of splits with which a prefill has enough programs to keep all processors busy.
    """
    max_tiles = shape.max_tiles
    if args.max_seq_len is not None:
        max_tiles = min(max_tiles, -(-args.max_seq_len // TILE_KEYS))
    decode_splits = prefill_splits = 0
    if decode_queries:
        # There is at least one split, which writes zeros if no sequence has a key.
        attended = max_tiles
        if args.query_positions is None:
            attended = min(max_tiles, args.mask.max_tiles(max(1, min(longest, DECODE_QUERIES))))
        decode_splits = max(1, min(shape.max_items, -(-attended // MIN_SPLIT_TILES)))
    if args.batch_invariant:
        prefill_splits = max(1, -(-max_tiles // (INVARIANT_SPLIT_KEYS // TILE_KEYS)))
    elif longest > decode_queries or not decode_queries:
        prefill_splits = 1
        if not _has_segments(args):
            prefill_splits = max(1, min(idle, max_tiles // 8, MAX_PREFILL_SPLITS))
    return decode_splits, prefill_splits


def _build_attention_launch(
    args: AttentionArgs,
    shape: PlanShape,
    tiles: Tiles,
    decoding: bool,
    programs: tuple[int, int, int],
    limits: tuple[int, int, int],
) -> Launch:
    """Return a launch of the attention kernel.

    `limits` has three numbers. Sequences with more queries than the first are prefills (0: all are). The second is the
    most queries that a decode of this call may have. The third is the number of splits.
    """
    from ..kernels.attention import _attention_kernel

    constexprs = {
        **compiled_for(args, tiles),
        "DECODE": decoding,
        "SPLIT_TILES": INVARIANT_SPLIT_KEYS // TILE_KEYS if args.batch_invariant else 0,
        "TWO_LOOPS": tiles.two_loops and not (_has_segments(args) or args.batch_invariant),
        "EQUAL_STRIDES": args.key_cache.stride() == args.value_cache.stride(),
    }
    lengths = (args.seq_lens.shape[0], args.query.shape[0], shape.max_tiles, shape.max_items)
    mask = (*numbers(args.mask), key_begin_of(args))
    values = (*lengths, *limits, args.scale, *numbers(args.terms), *mask, *strides_of(args))
    compiled = (tiles.num_warps, tiles.num_stages, aligned(*args), tiles.max_registers)
    return Launch(_attention_kernel, constexprs, programs, values, *compiled)
