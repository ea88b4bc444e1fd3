"""The attention kernel: one predicate and one tile loop for every operator, regime and option.

A program owns BLOCK_M rows, a row being one query token and one head of a KV head's group, and walks over key tiles of
TILE keys (`rows.py`). Here it finds which rows these are, from the plan's work list or from its place in the grid.
"""

from __future__ import annotations

from .._kernel import kernel
from .._triton import tl, triton
from .keys import PLAIN_CACHE
from .layout import (
    DEAD_TILES,
    INFO_FLAGS,
    ITEM,
    ITEM_BEGIN,
    ITEM_COUNT,
    ITEM_END,
    ITEM_ROW,
    LENGTHS,
    PARTIAL_TILES,
    _plan_parts,
    _plan_rows,
)
from .predicate import Mask, _whole_tile_queries
from .rows import _attend_rows
from .scores import Terms


@triton.jit
def _find_sequence(starts_ptr, num_seqs, index, STRIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last sequence whose first row tile (STRIDE 1) or first token (STRIDE 0) is at or before `index`."""
    count = 0
    for base in range(0, num_seqs, 128):
        offs = base + tl.arange(0, 128)
        start = tl.load(starts_ptr + offs, mask=offs < num_seqs, other=0)
        if STRIDE:
            start = tl.cast(start.to(tl.int64) * GROUP // BLOCK_M, tl.int32) + offs
        count += tl.sum(((start <= index) & (offs < num_seqs)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _zero_padding(
    starts_ptr, out_ptr, lse_ptr, num_seqs, num_tokens, kv_head,
    WITH_LSE: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Rows past the last sequence hold 0 and -inf."""
    offs_v = tl.arange(0, BLOCK_V)
    offs_g = tl.arange(0, BLOCK_G)
    for token in range(tl.load(starts_ptr + num_seqs) + tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64) * NUM_HEADS + kv_head * GROUP + offs_g
        mask = (offs_g[:, None] < GROUP) & (offs_v[None, :] < VALUE_DIM)
        zero = tl.zeros([BLOCK_G, BLOCK_V], out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * VALUE_DIM + offs_v[None, :], zero, mask=mask)
        if WITH_LSE:
            tl.store(lse_ptr + row, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=offs_g < GROUP)


@kernel(LENGTHS, mask=Mask, terms=Terms)
def _attention_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_ptr, value_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS // GROUP, HEAD_DIM or VALUE_DIM]
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    lse_ptr,  # [num_tokens, NUM_HEADS]
    partial_ptr, partial_lse_ptr,  # one row of VALUE_DIM per split and row, and its base-2 lse
    tables_ptr,  # [num_seqs, max_blocks], or [num_seqs, TABLE_HEADS, max_blocks]
    seq_lens_ptr, starts_ptr,  # [num_seqs], [num_seqs + 1]
    positions_ptr,  # [num_tokens]
    plan_ptr, alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, visits_ptr,
    tree_ptr,  # [num_tokens, tree_keys // 32]
    num_seqs, num_tokens, max_tiles, max_items, max_q, num_splits,
    scale, terms, mask, key_begin, num_blocks,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_bt, stride_bh,
    tree_keys, stride_tree,
    DECODE: tl.constexpr, DECODE_Q: tl.constexpr, SPLIT_TILES: tl.constexpr,
    POSITIONS: tl.constexpr, SINKS: tl.constexpr, SCALES: tl.constexpr, CODES: tl.constexpr, UPCAST: tl.constexpr,
    COUNT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, TABLE_HEADS: tl.constexpr, TREE: tl.constexpr,
    WITH_LSE: tl.constexpr, TWO_LOOPS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_G: tl.constexpr,
    SPECIALIZED_M: tl.constexpr, EQUAL_STRIDES: tl.constexpr,
):  # fmt: skip
    """DECODE: grid (any, KV heads * row tiles), a work list. Else: grid (row tiles, KV heads, splits).

    TABLE_HEADS above 1: a table and a row of the plan per KV head; a decode's work items then tell the KV head.
    SPECIALIZED_M above 0: `specialized.py` takes the queries of whole tiles, SPECIALIZED_M at once.
    EQUAL_STRIDES: values lie as keys do, and what is added to both pointers is computed once.
    """
    if EQUAL_STRIDES:
        stride_vb = stride_kb
        stride_vt = stride_kt
        stride_vh = stride_kh
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    # KV heads that program_id(1) tells apart, and heads beside each other in a decode's partial results.
    GRID_HEADS: tl.constexpr = KV_HEADS // TABLE_HEADS if DECODE else KV_HEADS
    SPLIT_HEADS: tl.constexpr = GROUP if DECODE and TABLE_HEADS > 1 else NUM_HEADS
    num_rows = num_seqs * TABLE_HEADS
    if DECODE:
        kv_head = tl.program_id(1) % GRID_HEADS
        row_begin = tl.program_id(1) // GRID_HEADS * BLOCK_M
        item_begin = tl.program_id(0)
        item_end = tl.load(plan_ptr)
        item_step = tl.num_programs(0)
    else:
        kv_head = tl.program_id(1)
        # The last tiles of a causal prefill are the longest: they start first.
        item_begin = tl.num_programs(0) - 1 - tl.program_id(0)
        item_end = item_begin + 1
        item_step = 1
    if DECODE or DECODE_Q == 0:  # noqa: SIM102  the first is known to the compiler
        if (tl.program_id(1) < GRID_HEADS) & (tl.program_id(2) == 0):
            for padded_head in tl.static_range(0, KV_HEADS, GRID_HEADS):
                _zero_padding(
                    starts_ptr, out_ptr, lse_ptr, num_seqs, num_tokens, kv_head + padded_head,
                    WITH_LSE, NUM_HEADS, GROUP, VALUE_DIM, BLOCK_V, BLOCK_G,
                )  # fmt: skip
    # What a program of a decode needs it needs once: kept through a loop over items, it would take registers.
    for item in tl.range(item_begin, item_end, item_step, disable_licm=DECODE and CODES == PLAIN_CACHE):
        if DECODE:
            item_ptr = _plan_parts(plan_ptr, num_rows, max_tiles, max_items)[1] + tl.cast(item, tl.int64) * ITEM
            row = tl.load(item_ptr + ITEM_ROW)
            seq = row // TABLE_HEADS
            if TABLE_HEADS > 1:
                kv_head = row % TABLE_HEADS
            i_begin = tl.load(item_ptr + ITEM_BEGIN)
            i_end = tl.load(item_ptr + ITEM_END)
            split_row = tl.cast(item, tl.int64) * max_q * SPLIT_HEADS
            if TABLE_HEADS > 1:
                split_row -= kv_head * GROUP
            # A plan that was made for another call may split where this one has no room for parts.
            is_split = (tl.load(item_ptr + ITEM_COUNT) > 1) & (num_splits > 1)
        else:
            seq = _find_sequence(starts_ptr, num_seqs, item, 1, GROUP, BLOCK_M)
            row = seq
            if TABLE_HEADS > 1:
                row = seq * TABLE_HEADS + kv_head
            i_begin = tl.program_id(2)
            i_end = 0
            is_split = num_splits > 1
        q_begin = tl.load(starts_ptr + seq)
        q_len = tl.load(starts_ptr + seq + 1) - q_begin
        seq_len = tl.load(seq_lens_ptr + seq)
        info_ptr, tiles_ptr, ranks_ptr = _plan_rows(plan_ptr, row, num_rows, max_tiles, max_items)
        if DECODE:
            active = row_begin < q_len * GROUP
        else:
            split_row = (tl.cast(tl.program_id(2), tl.int64) * num_tokens + q_begin) * NUM_HEADS
            tile = item - (tl.cast(tl.cast(q_begin, tl.int64) * GROUP // BLOCK_M, tl.int32) + seq)
            row_begin = tile * BLOCK_M
            active = (row_begin < q_len * GROUP) & (q_len > DECODE_Q)
            if SPECIALIZED_M > 0:
                has_partial = (tl.load(info_ptr + INFO_FLAGS) & PARTIAL_TILES) != 0
                done = _whole_tile_queries(q_len, seq_len, has_partial, DECODE_Q, SPECIALIZED_M)
                active = active & (row_begin // GROUP >= done)
        if active:
            flags = tl.load(info_ptr + INFO_FLAGS)
            table_ptr = tables_ptr + tl.cast(seq, tl.int64) * stride_bt
            if TABLE_HEADS > 1:
                table_ptr += tl.cast(kv_head, tl.int64) * stride_bh
            _attend_rows(
                query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                table_ptr, positions_ptr,
                alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, visits_ptr,
                tiles_ptr, ranks_ptr, (flags & DEAD_TILES) != 0, (flags & PARTIAL_TILES) != 0,
                q_begin, q_len, seq_len, row_begin, kv_head, i_begin, i_end, split_row, is_split, num_splits,
                scale, terms, mask, key_begin, num_blocks,
                stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                tree_ptr, tree_keys, stride_tree,
                DECODE, SPLIT_TILES, POSITIONS, SINKS, SCALES, CODES, UPCAST, COUNT, DESCRIPTORS, SPLIT_HEADS, TREE,
                WITH_LSE, TWO_LOOPS, NUM_HEADS,
                GROUP, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip
