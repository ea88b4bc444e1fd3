"""Host side of the attention kernels: what to launch, on which grid, with which constants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .._quantize import as_codes, scale_arguments
from .._triton import INTERPRET, require_triton, triton
from . import constants
from .constants import Tiles, architecture, decode_tiles, next_power_of_2, prefill_tiles
from .kernel import _attention_kernel, _merge_splits_kernel
from .layout import DECODE_QUERIES, TILE_KEYS, PlanOptions, PlanShape
from .plan import launch_plan
from .reference import Mask

# Batch-invariant mode: keys per split, whatever the batch. Longer contexts are summed from splits of this length.
INVARIANT_SPLIT_KEYS = 8192
MAX_PREFILL_SPLITS = 16

_visits: torch.Tensor | None = None


@contextlib.contextmanager
def count_tiles(device: torch.device) -> Iterator[torch.Tensor]:
    """Within it, every attention kernel adds the key tiles its programs visited to the yielded int32 element."""
    global _visits
    _visits = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        yield _visits
    finally:
        _visits = None


def plan_options(mask: Mask, has_positions: bool, batch_invariant: bool, key_begin: int = 0) -> PlanOptions:
    """The plan that a call with this mask needs."""
    # Scattered queries under a window are tiled over queries, whose windows are then united.
    tiled = batch_invariant or (has_positions and mask.window > 0)
    return PlanOptions(
        causal=mask.causal,
        window=mask.window,
        num_sink_tokens=mask.num_sink_tokens if mask.window else 0,
        decode_queries=0 if tiled else DECODE_QUERIES,
        key_begin=key_begin,
    )


def wanted_items(num_processors: int, programs_per_item: int) -> int:
    """How many work items of a decode keep every processor at four programs."""
    return max(1, 4 * num_processors // programs_per_item)


@dataclass(frozen=True)
class _Split:
    rows: torch.Tensor
    lse: torch.Tensor


def launch_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    mask: Mask,
    options: PlanOptions,
    query_positions: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    plan: torch.Tensor | None = None,
    batch_invariant: bool = False,
    with_lse: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the attention kernels; arguments as in `attend`, already checked; out in `out_dtype`, else like query.

    A decode launch takes sequences of up to DECODE_QUERIES queries, a prefill launch the longer ones; a launch whose
    sequences cannot exist, by max_query_len or by shape, is left out. Splits are summed by a third.
    """
    require_triton("attention")
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    assert key_cache.stride(3) == value_cache.stride(3) == 1
    assert block_size & (block_size - 1) == 0
    out = query.new_empty(query.shape, dtype=out_dtype)
    lse = query.new_empty((num_tokens, num_heads), dtype=torch.float32) if with_lse else None
    if num_tokens == 0 or num_heads == 0:
        return out, lse
    shape = PlanShape.of(block_tables, block_size)
    if shape.num_seqs == 0 or shape.max_tiles == 0:
        # Nothing to attend to: sinks alone decide, and only rows of a sequence have them.
        return _empty(out, lse, query_start_loc, sinks)

    arch = architecture(query.device)
    group = num_heads // num_kv_heads
    longest = num_tokens if max_query_len is None else min(num_tokens, max_query_len)
    decode_q = max(1, min(longest, DECODE_QUERIES))
    quantized = key_cache.dtype != query.dtype
    decode = decode_tiles(arch.name, head_dim, query.element_size(), decode_q * group, quantized)
    row_tiles = -(-decode_q * group // decode.block_m)
    target_items = wanted_items(arch.num_processors, num_kv_heads * row_tiles)
    if plan is None:
        plan = torch.empty(shape.size, dtype=torch.int32, device=query.device)
        launch_plan(plan, block_tables, seq_lens, query_start_loc, query_positions, block_size, options, target_items)

    max_tiles = shape.max_tiles if max_seq_len is None else min(shape.max_tiles, -(-max_seq_len // TILE_KEYS))
    segments = query_positions is not None and mask.window > 0
    heavy = quantized or segments or mask.softcap > 0 or mask.alibi_slopes is not None
    prefill = prefill_tiles(arch.name, head_dim, query.element_size(), heavy)
    two_loops = prefill.two_loops and not segments and not batch_invariant
    prefill_tiles_bound = num_tokens * group // prefill.block_m + shape.num_seqs
    run_decode = options.decode_queries > 0
    run_prefill = longest > options.decode_queries or not run_decode
    num_splits, split_tiles = 1, 0
    if batch_invariant:
        split_tiles = INVARIANT_SPLIT_KEYS // TILE_KEYS
        num_splits = max(1, -(-max_tiles // split_tiles))
    elif not segments:
        idle = 2 * arch.num_processors // (prefill_tiles_bound * num_kv_heads)
        num_splits = max(1, min(idle, max_tiles // 8, MAX_PREFILL_SPLITS))
    decode_splits = _splits(query, shape.max_items * decode_q) if run_decode and max_tiles > 4 else None
    prefill_splits = _splits(query, num_splits * num_tokens) if run_prefill and num_splits > 1 else None

    if not arch.has_e4m3:
        key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
    scales, k_scale, v_scale = scale_arguments(k_scale, v_scale, num_kv_heads)

    num_rows = key_cache.shape[0] * block_size
    described = arch.name in constants.DESCRIPTOR_ARCHITECTURES and all(
        _describable(cache, num_rows) for cache in (key_cache, value_cache)
    )
    if described and not INTERPRET:
        # Descriptors that a kernel makes lie in memory that the launcher has to give it.
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=query.device))

    def launch(grid: tuple[int, ...], tiles: Tiles, splits: _Split | None, decoding: bool) -> None:
        _attention_kernel[grid](
            query,
            key_cache,
            value_cache,
            out,
            out if lse is None else lse,
            out if splits is None else splits.rows,
            out if splits is None else splits.lse,
            block_tables,
            seq_lens,
            query_start_loc,
            seq_lens if query_positions is None else query_positions,
            plan,
            out if mask.alibi_slopes is None else mask.alibi_slopes,
            out if sinks is None else sinks,
            out if k_scale is None else k_scale,
            out if v_scale is None else v_scale,
            seq_lens if _visits is None else _visits,
            shape.num_seqs,
            num_tokens,
            shape.max_tiles,
            shape.max_items,
            decode_q,
            1 if decoding else num_splits,
            scale,
            mask.softcap,
            mask.window,
            options.num_sink_tokens,
            options.key_begin,
            num_rows,
            query.stride(0),
            query.stride(1),
            key_cache.stride(0),
            key_cache.stride(1),
            key_cache.stride(2),
            value_cache.stride(0),
            value_cache.stride(1),
            value_cache.stride(2),
            block_tables.stride(0),
            DECODE=decoding,
            DECODE_Q=options.decode_queries,
            SPLIT_TILES=split_tiles,
            CAUSAL=mask.causal,
            WINDOW=mask.window > 0,
            POSITIONS=query_positions is not None,
            SOFTCAP=mask.softcap > 0,
            ALIBI=mask.alibi_slopes is not None,
            SINKS=sinks is not None,
            SCALES=scales,
            FP8=key_cache.dtype == torch.uint8,
            UPCAST=INTERPRET and query.dtype == torch.bfloat16,
            COUNT=_visits is not None,
            DESCRIPTORS=described and block_size >= tiles.block_n,
            WITH_LSE=with_lse,
            TWO_LOOPS=two_loops and not decoding,
            NUM_HEADS=num_heads,
            GROUP=group,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_D=max(16, next_power_of_2(head_dim)),
            BLOCK_G=next_power_of_2(group),
            SUB=TILE_KEYS // tiles.block_n,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )

    if run_decode:
        items = min(shape.max_items, shape.num_seqs + target_items)
        launch((items, num_kv_heads * row_tiles), decode, decode_splits, True)
    if run_prefill:
        launch((prefill_tiles_bound, num_kv_heads, num_splits), prefill, prefill_splits, False)
    if decode_splits is not None or prefill_splits is not None:
        decode_rows = decode_splits or prefill_splits
        prefill_rows = prefill_splits or decode_splits
        assert decode_rows is not None
        assert prefill_rows is not None
        block_d = next_power_of_2(head_dim)
        block_h = max(1, min(next_power_of_2(num_heads), 2048 // block_d))
        _merge_splits_kernel[(num_tokens, -(-num_heads // block_h))](
            out,
            out if lse is None else lse,
            decode_rows.rows,
            decode_rows.lse,
            prefill_rows.rows,
            prefill_rows.lse,
            query_start_loc,
            plan,
            out if sinks is None else sinks,
            shape.num_seqs,
            num_tokens,
            decode_q,
            num_splits,
            DECODE_Q=options.decode_queries,
            SINKS=sinks is not None,
            WITH_LSE=with_lse,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out, lse


def _describable(cache: torch.Tensor, num_rows: int) -> bool:
    """Whether a head's rows are one matrix that the tensor memory accelerator takes: evenly spaced, 16-byte aligned."""
    strides = [stride * cache.element_size() for stride in cache.stride()[1:3]]
    aligned = cache.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides)
    even = cache.stride(0) == cache.shape[1] * cache.stride(1)
    return aligned and even and num_rows < 2**31 and cache.shape[3] * cache.element_size() % 16 == 0


def _splits(query: torch.Tensor, rows: int) -> _Split:
    _, num_heads, head_dim = query.shape
    return _Split(
        query.new_empty((rows, num_heads, head_dim), dtype=torch.float32),
        query.new_empty((rows, num_heads), dtype=torch.float32),
    )


def _empty(
    out: torch.Tensor, lse: torch.Tensor | None, query_start_loc: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """No sequence or no block table: every row is 0."""
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
        if sinks is not None:
            rows = torch.arange(out.shape[0], device=out.device) < query_start_loc[-1]
            lse.copy_(torch.where(rows[:, None], sinks.float()[None], lse))
    return out, lse
