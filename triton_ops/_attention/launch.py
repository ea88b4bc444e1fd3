"""Host side of the attention kernels: what to launch, on which grid, with which constants.

`prepare` decides from metadata alone and is asked once for calls of the same signature, so once for all layers of a
step; `launch_attention` then allocates, fills in addresses and launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .._launcher import KernelLaunch, aligned, remember
from .._quantize import as_codes, equal_scales, scale_kind
from .._triton import INTERPRET, require_triton, triton
from . import constants
from .call import AttentionCall
from .checks import check_attention, check_grad
from .constants import (
    Architecture,
    Tiles,
    architecture,
    decode_tiles,
    next_power_of_2,
    prefill_tiles,
    programs_per_processor,
    specialized_tiles,
)
from .kernel import _attention_kernel, _merge_splits_kernel
from .layout import DECODE_QUERIES, TILE_KEYS, PlanOptions, PlanShape
from .plan import launch_plan
from .specialized import _specialized_attention_kernel

# Batch-invariant mode: keys per split, whatever the batch. Longer contexts are summed from splits of this length.
INVARIANT_SPLIT_KEYS = 8192
MAX_PREFILL_SPLITS = 16

_visits: torch.Tensor | None = None
_prepared: dict[object, Prepared] = {}


@contextlib.contextmanager
def count_tiles(device: torch.device) -> Iterator[torch.Tensor]:
    """Within it, every attention kernel adds the key tiles its programs visited to the yielded int32 element."""
    global _visits
    _visits = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        yield _visits
    finally:
        _visits = None


def forget_prepared() -> None:
    """Makes the next calls decide anew: for whoever changes what the decisions rest on."""
    _prepared.clear()


def plan_options(
    causal: bool, window: int, num_sink_tokens: int, has_positions: bool, batch_invariant: bool, key_begin: int = 0
) -> PlanOptions:
    """The plan that a call with these arguments needs."""
    # Scattered queries under a window are tiled over queries, whose windows are then united.
    tiled = batch_invariant or (has_positions and window > 0)
    return PlanOptions(
        causal=causal,
        window=window,
        num_sink_tokens=num_sink_tokens if window else 0,
        decode_queries=0 if tiled else DECODE_QUERIES,
        key_begin=key_begin,
    )


def wanted_items(arch: Architecture, programs_per_item: int) -> int:
    """How many work items of a decode keep every processor busy."""
    return max(1, programs_per_processor(arch.name) * arch.num_processors // programs_per_item)


@dataclass(frozen=True, slots=True)
class _Regime:
    """One launch of the attention kernel: for sequences of few queries from the work list, or tiled over queries."""

    launch: KernelLaunch
    grid: tuple[int, int, int]
    split_rows: int  # rows of partial results; 0 for none
    num_splits: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a call launches, as far as its signature tells."""

    shape: PlanShape
    options: PlanOptions
    target_items: int
    decode_q: int
    num_splits: int
    convert_codes: bool
    descriptors: bool
    decode: _Regime | None
    prefill: _Regime | None
    specialized: KernelLaunch | None
    specialized_grid: tuple[int, int, int]
    merge: KernelLaunch
    merge_grid: tuple[int, int, int]


def prepare(call: AttentionCall, with_lse: bool, tiled: bool, is_aligned: bool) -> Prepared:
    """Decides how a call that passed its checks is launched, from metadata alone.

    A decode launch takes sequences of up to DECODE_QUERIES queries, a prefill launch the longer ones; a launch whose
    sequences cannot exist, by max_query_len or by shape, is left out.

    Args:
        call: The call.
        with_lse: Whether the lse is wanted.
        tiled: Whether even few queries are tiled, not decoded from the work list.
        is_aligned: Whether all of the call's tensors begin at multiples of 16 bytes.
    """
    query, key_cache, value_cache = call.query, call.key_cache, call.value_cache
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    has_positions = call.query_positions is not None
    shape = PlanShape.of(call.block_tables, block_size)
    options = plan_options(
        call.causal, call.window, call.num_sink_tokens, has_positions, call.batch_invariant or tiled, call.key_begin
    )
    arch = architecture(query.device)
    group = num_heads // num_kv_heads
    longest = num_tokens if call.max_query_len is None else min(num_tokens, call.max_query_len)
    decode_q = max(1, min(longest, DECODE_QUERIES))
    quantized = key_cache.dtype != query.dtype
    decode = decode_tiles(arch.name, head_dim, query.element_size(), decode_q * group, quantized, group, block_size)
    row_tiles = -(-decode_q * group // decode.block_m)
    target_items = wanted_items(arch, num_kv_heads * row_tiles)

    max_tiles = shape.max_tiles
    if call.max_seq_len is not None:
        max_tiles = min(max_tiles, -(-call.max_seq_len // TILE_KEYS))
    segments = has_positions and call.window > 0
    heavy = quantized or segments or call.softcap > 0 or call.alibi_slopes is not None
    prefill = prefill_tiles(arch.name, head_dim, query.element_size(), heavy, group, block_size)
    two_loops = prefill.two_loops and not segments and not call.batch_invariant
    prefill_bound = num_tokens * group // prefill.block_m + shape.num_seqs
    run_decode = options.decode_queries > 0
    run_prefill = longest > options.decode_queries or not run_decode
    num_splits, split_tiles = 1, 0
    if call.batch_invariant:
        split_tiles = INVARIANT_SPLIT_KEYS // TILE_KEYS
        num_splits = max(1, -(-max_tiles // split_tiles))
    elif not segments:
        idle = 2 * arch.num_processors // (prefill_bound * num_kv_heads)
        num_splits = max(1, min(idle, max_tiles // 8, MAX_PREFILL_SPLITS))

    convert_codes = key_cache.dtype == torch.float8_e4m3fn and not arch.has_e4m3
    num_rows = key_cache.shape[0] * block_size
    describable = is_aligned and all(_describable(cache, num_rows) for cache in (key_cache, value_cache))
    everywhere = arch.name in constants.DESCRIPTOR_ARCHITECTURES
    described = describable and (everywhere or decode.descriptors or prefill.descriptors)
    special = specialized_tiles(arch.name, head_dim, query.element_size())
    if special is not None and not (
        run_prefill
        and describable
        and all(stride * query.element_size() % 16 == 0 for stride in query.stride()[:2])
        and call.causal
        and not (has_positions or heavy or call.batch_invariant)
        and num_splits == 1
        and block_size >= TILE_KEYS
        # Its tiles of queries have to be whole tiles of rows here.
        and special.block_m % (max(1, prefill.block_m // group)) == 0
        and prefill.block_m % group == 0
        and _visits is None
    ):
        special = None

    def regime(tiles: Tiles, decoding: bool, grid: tuple[int, int, int], split_rows: int) -> _Regime:
        constexprs = {
            "DECODE": decoding,
            "DECODE_Q": options.decode_queries,
            "SPLIT_TILES": split_tiles,
            "CAUSAL": call.causal,
            "WINDOW": call.window > 0,
            "POSITIONS": has_positions,
            "SOFTCAP": call.softcap > 0,
            "ALIBI": call.alibi_slopes is not None,
            "SINKS": call.sinks is not None,
            "SCALES": scale_kind(call.k_scale, call.v_scale),
            "FP8": convert_codes,
            "UPCAST": INTERPRET and query.dtype == torch.bfloat16,
            "COUNT": _visits is not None,
            "DESCRIPTORS": described and (everywhere or tiles.descriptors) and block_size >= tiles.block_n,
            "WITH_LSE": with_lse,
            "TWO_LOOPS": two_loops and not decoding,
            "NUM_HEADS": num_heads,
            "GROUP": group,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "BLOCK_G": next_power_of_2(group),
            "SUB": TILE_KEYS // tiles.block_n,
            "SPECIALIZED_M": 0 if special is None or decoding else special.block_m,
        }
        launch = KernelLaunch(constexprs, tiles.num_warps, tiles.num_stages, is_aligned)
        return _Regime(launch, grid, split_rows, 1 if decoding else num_splits)

    decoding = tiling = None
    if run_decode:
        grid = (min(shape.max_items, shape.num_seqs + target_items), num_kv_heads * row_tiles, 1)
        decoding = regime(decode, True, grid, shape.max_items * decode_q if max_tiles > 4 else 0)
    if run_prefill:
        grid = (prefill_bound, num_kv_heads, num_splits)
        tiling = regime(prefill, False, grid, num_splits * num_tokens if num_splits > 1 else 0)
    specialized = None
    if special is not None:
        constexprs = {
            "DECODE_Q": options.decode_queries,
            "WINDOW": call.window > 0,
            "SINKS": call.sinks is not None,
            "WITH_LSE": with_lse,
            "UPCAST": INTERPRET and query.dtype == torch.bfloat16,
            "NUM_HEADS": num_heads,
            "GROUP": group,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "BLOCK_M": special.block_m,
            "BLOCK_N": special.block_n,
            "STAGES": special.num_stages,
        }
        specialized = KernelLaunch(constexprs, special.num_warps, special.num_stages, is_aligned)
    block_d = next_power_of_2(head_dim)
    block_h = max(1, min(next_power_of_2(num_heads), 2048 // block_d))
    constexprs = {
        "DECODE_Q": options.decode_queries,
        "SINKS": call.sinks is not None,
        "WITH_LSE": with_lse,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
    }
    return Prepared(
        shape=shape,
        options=options,
        target_items=target_items,
        decode_q=decode_q,
        num_splits=num_splits,
        convert_codes=convert_codes,
        descriptors=described or special is not None,
        decode=decoding,
        prefill=tiling,
        specialized=specialized,
        specialized_grid=(num_tokens // (special.block_m if special else 1) + shape.num_seqs, num_heads, 1),
        merge=KernelLaunch(constexprs, 4, None, is_aligned),
        merge_grid=(num_tokens, -(-num_heads // block_h), 1),
    )


def launch_attention(
    call: AttentionCall, with_lse: bool = True, out_dtype: torch.dtype | None = None, tiled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the attention kernels; a launch each for decodes and prefills, and one that sums their splits.

    Args:
        call: The call; checked here as far as metadata tells.
        with_lse: Whether the second result is wanted; without it, it is empty.
        out_dtype: Of the first result; None: like query.
        tiled: Whether even few queries are tiled, not decoded from the work list.
    """
    require_triton("attention")
    query, key_cache, value_cache, block_tables = call.query, call.key_cache, call.value_cache, call.block_tables
    seq_lens, starts, positions, plan = call.seq_lens, call.query_start_loc, call.query_positions, call.plan
    alibi_slopes, sinks, k_scale, v_scale = call.alibi_slopes, call.sinks, call.k_scale, call.v_scale
    is_aligned = aligned(query, key_cache, value_cache, block_tables, seq_lens, starts, positions, plan)
    is_aligned = is_aligned and aligned(alibi_slopes, sinks, k_scale, v_scale)
    signature = (with_lse, out_dtype, tiled, is_aligned, _visits is None, *call.signature())
    prepared = _prepared.get(signature)
    if prepared is None:
        check_attention(call)
    elif torch.is_grad_enabled():
        check_grad(call)
    out = query.new_empty(query.shape, dtype=out_dtype)
    lse = query.new_empty(query.shape[:2] if with_lse else 0, dtype=torch.float32)
    if prepared is None:
        if out.shape[0] == 0 or out.shape[1] == 0:
            return out, lse
        if block_tables.shape[0] == 0 or block_tables.shape[1] == 0:
            # Nothing to attend to: sinks alone decide, and only rows of a sequence have them.
            return _empty(call, out, lse)
        prepared = remember(_prepared, signature, prepare(call, with_lse, tiled, is_aligned))

    block_size = key_cache.shape[1]
    shape, options = prepared.shape, prepared.options
    if plan is None:
        plan = torch.empty(shape.size, dtype=torch.int32, device=query.device)
        launch_plan(plan, block_tables, seq_lens, starts, positions, block_size, options, prepared.target_items)
    if prepared.convert_codes:
        key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
    k_scale, v_scale = equal_scales(k_scale, v_scale, key_cache.shape[2])
    if prepared.descriptors and not INTERPRET:
        # Descriptors that a kernel makes lie in memory that the launcher has to give it.
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=query.device))

    def launch(regime: _Regime | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        if regime is None:
            return None
        splits = None
        if count := regime.split_rows:
            splits = (
                query.new_empty((count, *query.shape[1:]), dtype=torch.float32),
                query.new_empty((count, query.shape[1]), dtype=torch.float32),
            )
        rows, rows_lse = splits or (out, out)
        regime.launch(
            _attention_kernel,
            regime.grid,
            query,
            key_cache,
            value_cache,
            out,
            lse,
            rows,
            rows_lse,
            block_tables,
            seq_lens,
            starts,
            seq_lens if positions is None else positions,
            plan,
            out if alibi_slopes is None else alibi_slopes,
            out if sinks is None else sinks,
            out if k_scale is None else k_scale,
            out if v_scale is None else v_scale,
            seq_lens if _visits is None else _visits,
            shape.num_seqs,
            query.shape[0],
            shape.max_tiles,
            shape.max_items,
            prepared.decode_q,
            regime.num_splits,
            call.scale,
            call.softcap,
            call.window,
            options.num_sink_tokens,
            options.key_begin,
            key_cache.shape[0] * block_size,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            block_tables.stride(0),
        )
        return splits

    if prepared.specialized is not None:
        prepared.specialized(
            _specialized_attention_kernel,
            prepared.specialized_grid,
            query,
            key_cache,
            value_cache,
            out,
            lse,
            block_tables,
            seq_lens,
            starts,
            plan,
            out if sinks is None else sinks,
            shape.num_seqs,
            query.shape[0],
            shape.max_tiles,
            shape.max_items,
            call.scale,
            call.window,
            options.num_sink_tokens,
            options.key_begin,
            key_cache.shape[0] * block_size,
            *query.stride()[:2],
            *key_cache.stride()[1:3],
            *value_cache.stride()[1:3],
            block_tables.stride(0),
        )
    decode_splits, prefill_splits = launch(prepared.decode), launch(prepared.prefill)
    if decode_splits or prefill_splits:
        prepared.merge(
            _merge_splits_kernel,
            prepared.merge_grid,
            out,
            lse,
            *(decode_splits or prefill_splits or ()),
            *(prefill_splits or decode_splits or ()),
            starts,
            plan,
            out if sinks is None else sinks,
            shape.num_seqs,
            query.shape[0],
            prepared.decode_q,
            prepared.num_splits,
        )
    return out, lse


def _describable(cache: torch.Tensor, num_rows: int) -> bool:
    """Whether a head's rows are one matrix that the tensor memory accelerator takes: evenly, by 16 bytes, spaced."""
    strides = [stride * cache.element_size() for stride in cache.stride()[1:3]]
    aligned = all(stride % 16 == 0 for stride in strides)
    even = cache.stride(0) == cache.shape[1] * cache.stride(1)
    return aligned and even and num_rows < 2**31 and cache.shape[3] * cache.element_size() % 16 == 0


def _empty(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No sequence or no block table: every row is 0."""
    out.zero_()
    lse.fill_(float("-inf"))
    if lse.numel() and call.sinks is not None:
        rows = torch.arange(out.shape[0], device=out.device) < call.query_start_loc[-1]
        lse.copy_(torch.where(rows[:, None], call.sinks.float()[None], lse))
    return out, lse
