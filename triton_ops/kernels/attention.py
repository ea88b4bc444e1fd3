"""The attention kernel, one for all operators, regimes and options, its tensors, and the merge of its splits.

A program owns BLOCK_M rows and walks over key tiles of TILE keys (`program.py`). A row is one query token and one head
of a KV head's group. This file finds the rows, from the plan's work list or from the program's place in the grid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._attention.parameters import UNSPECIALIZED, Strides, TileSizes, Traits
from .._attention.predicate import Mask
from .._attention.scores import ScoreModifiers
from .bundles import kernel
from .layout import (
    DEAD_TILES,
    INFO,
    INFO_FIRST,
    INFO_FLAGS,
    INFO_ITEMS,
    ITEM,
    ITEM_BEGIN,
    ITEM_COUNT,
    ITEM_END,
    ITEM_ROW,
    PARTIAL_TILES,
    _plan_parts,
    _plan_rows,
)
from .mainloop import PLAIN_CACHE
from .program import Sequence, _attend_rows
from .scores import _finish


class AttentionTensors(NamedTuple):
    """Pointers to the tensors of an attention call."""

    query_ptr: Any  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_ptr: Any  # [num_blocks, BLOCK_SIZE, NUM_HEADS // GROUP, HEAD_DIM]
    value_ptr: Any  # [num_blocks, BLOCK_SIZE, NUM_HEADS // GROUP, VALUE_DIM]; with ROPE_COLUMNS not read
    out_ptr: Any  # [num_tokens, NUM_HEADS, VALUE_DIM]
    lse_ptr: Any  # [num_tokens, NUM_HEADS]
    partial_ptr: Any  # a row of VALUE_DIM for each split and row
    partial_lse_ptr: Any  # the base-2 lse of these
    tables_ptr: Any  # [num_seqs, max_blocks], or [num_seqs, TABLE_HEADS, max_blocks]
    seq_lens_ptr: Any  # [num_seqs]
    starts_ptr: Any  # [num_seqs + 1]
    positions_ptr: Any  # [num_tokens]
    alibi_ptr: Any  # [NUM_HEADS]
    sinks_ptr: Any  # [NUM_HEADS]
    k_scale_ptr: Any
    v_scale_ptr: Any
    tree_ptr: Any  # [num_tokens, tree_keys // 32]


@triton.jit
def _find_sequence(starts_ptr, num_seqs, index, STRIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the last sequence whose first row tile (STRIDE 1) or first token (STRIDE 0) is at or before `index`."""
    count = 0
    for base in range(0, num_seqs, 128):
        offs = base + tl.arange(0, 128)
        start = tl.load(starts_ptr + offs, mask=offs < num_seqs, other=0)
        if STRIDE:
            start = tl.cast(start.to(tl.int64) * GROUP // BLOCK_M, tl.int32) + offs
        count += tl.sum(((start <= index) & (offs < num_seqs)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _table_of(tables_ptr, seq, head, stride_bt, stride_bh, TABLE_HEADS: tl.constexpr):
    """Return a pointer to a sequence's block table; with TABLE_HEADS above 1, to the table of one of its KV heads."""
    table_ptr = tables_ptr + tl.cast(seq, tl.int64) * stride_bt
    if TABLE_HEADS > 1:
        table_ptr += tl.cast(head, tl.int64) * stride_bh
    return table_ptr


@triton.jit
def _zero_padding(tensors, num_seqs, num_tokens, kv_head, traits, tile):
    """Write zeros, and -inf as lse, for query tokens after the last sequence."""
    offs_g = tl.arange(0, tile.BLOCK_G)
    for token in range(tl.load(tensors.starts_ptr + num_seqs) + tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64) * traits.NUM_HEADS + kv_head * traits.GROUP + offs_g
        for first_v in tl.static_range(0, tile.VALUE_SPLITS * tile.BLOCK_V, tile.BLOCK_V):
            offs_v = first_v + tl.arange(0, tile.BLOCK_V)
            mask = (offs_g[:, None] < traits.GROUP) & (offs_v[None, :] < traits.VALUE_DIM)
            zero = tl.zeros([tile.BLOCK_G, tile.BLOCK_V], tensors.out_ptr.dtype.element_ty)
            tl.store(tensors.out_ptr + row[:, None] * traits.VALUE_DIM + offs_v[None, :], zero, mask=mask)
        if traits.WITH_LSE:
            none = tl.full([tile.BLOCK_G], float("-inf"), tl.float32)
            tl.store(tensors.lse_ptr + row, none, mask=offs_g < traits.GROUP)


@triton.jit
def _zero_padding_once(
    tensors, num_seqs, num_tokens, kv_head, decode_queries, traits, tile, GRID_HEADS: tl.constexpr, DECODE: tl.constexpr
):
    """Call `_zero_padding` in only one launch of a call: the decode if there is one, otherwise the prefill.

    The programs of the first split and row tile of each KV head share the work.
    """
    zeroes = (tl.program_id(1) < GRID_HEADS) & (tl.program_id(2) == 0)
    if not DECODE:
        zeroes = zeroes & (decode_queries == 0)
    if zeroes:
        for padded_head in tl.static_range(0, traits.NUM_HEADS // traits.GROUP, GRID_HEADS):
            _zero_padding(tensors, num_seqs, num_tokens, kv_head + padded_head, traits, tile)


@triton.jit
def _with_equal_strides(strides):
    """Replace the strides of values by the equal strides of keys, so that common offsets are computed once."""
    return Strides(
        strides.stride_qt, strides.stride_qh, strides.stride_kb, strides.stride_kt, strides.stride_kh,
        strides.stride_kb, strides.stride_kt, strides.stride_kh, strides.stride_bt, strides.stride_bh,
        strides.tree_keys, strides.stride_tree,
    )  # fmt: skip


@triton.jit
def _work_item(items_ptr, item, max_q, num_splits, traits, SPLIT_HEADS: tl.constexpr):
    """Return a decode work item's row of the plan, its live tiles, and the place of its partial result, if any."""
    item_ptr = items_ptr + tl.cast(item, tl.int64) * ITEM
    row = tl.load(item_ptr + ITEM_ROW)
    i_begin = tl.load(item_ptr + ITEM_BEGIN)
    i_end = tl.load(item_ptr + ITEM_END)
    split_row = tl.cast(item, tl.int64) * max_q * SPLIT_HEADS
    if traits.TABLE_HEADS > 1:
        split_row -= row % traits.TABLE_HEADS * traits.GROUP
    # A plan made for another call may have splits where this call has no room for partial results.
    is_split = (tl.load(item_ptr + ITEM_COUNT) > 1) & (num_splits > 1)
    return row, i_begin, i_end, split_row, is_split


BUNDLES: dict[str, Any] = {
    "tensors": AttentionTensors,
    "terms": ScoreModifiers,
    "mask": Mask,
    "strides": Strides,
    "traits": Traits,
    "tile": TileSizes,
}
"""The named tuples of an attention kernel, by parameter; see `kernel`."""


@kernel(UNSPECIALIZED, **BUNDLES)
def _attention_kernel(
    tensors, plan_ptr, num_seqs, num_tokens, max_tiles, max_items, decode_queries, max_q, num_splits,
    scale, terms, mask, key_begin, strides, traits, tile,
    DECODE: tl.constexpr, SPLIT_TILES: tl.constexpr, TWO_LOOPS: tl.constexpr, EQUAL_STRIDES: tl.constexpr,
):  # fmt: skip
    """Compute attention, as a decode over a work list or as a prefill.

    DECODE: grid (any, KV heads * row tiles * parts). Else: grid (row tiles, KV heads * parts, splits). A prefill skips
    sequences of up to decode_queries queries, which the decode handles; with 0 there is no decode. TABLE_HEADS above 1:
    each KV head has a table and a row of the plan, and a decode's work items name the KV head.
    """
    if EQUAL_STRIDES:
        strides = _with_equal_strides(strides)
    GROUP: tl.constexpr = traits.GROUP
    TABLE_HEADS: tl.constexpr = traits.TABLE_HEADS
    KV_HEADS: tl.constexpr = traits.NUM_HEADS // GROUP
    # Number of KV heads in program_id(1), and of heads side by side in a decode's partial results.
    GRID_HEADS: tl.constexpr = KV_HEADS // TABLE_HEADS if DECODE else KV_HEADS
    SPLIT_HEADS: tl.constexpr = GROUP if DECODE and TABLE_HEADS > 1 else traits.NUM_HEADS
    num_rows = num_seqs * TABLE_HEADS
    place = tl.program_id(1) // tile.VALUE_SPLITS
    part = tl.program_id(1) % tile.VALUE_SPLITS
    if DECODE:
        kv_head = place % GRID_HEADS
        row_begin = place // GRID_HEADS * tile.BLOCK_M
        item_begin = tl.program_id(0)
        item_end = tl.load(plan_ptr)
        item_step = tl.num_programs(0)
    else:
        kv_head = place
        # The last tiles of a causal prefill take longest, so they start first.
        item_begin = tl.num_programs(0) - 1 - tl.program_id(0)
        item_end = item_begin + 1
        item_step = 1
    _zero_padding_once(tensors, num_seqs, num_tokens, kv_head, decode_queries, traits, tile, GRID_HEADS, DECODE)
    # Hoisting these loads out of the loop over items would keep their values in registers.
    ONCE: tl.constexpr = DECODE and (traits.CODES == PLAIN_CACHE or traits.ROPE_COLUMNS > 0)
    for item in tl.range(item_begin, item_end, item_step, disable_licm=ONCE):
        if DECODE:
            items_ptr = _plan_parts(plan_ptr, num_rows, max_tiles, max_items)[1]
            row, i_begin, i_end, split_row, is_split = _work_item(
                items_ptr, item, max_q, num_splits, traits, SPLIT_HEADS
            )  # fmt: skip
            seq = row // TABLE_HEADS
            if TABLE_HEADS > 1:
                kv_head = row % TABLE_HEADS
        else:
            seq = _find_sequence(tensors.starts_ptr, num_seqs, item, 1, GROUP, tile.BLOCK_M)
            row = seq
            if TABLE_HEADS > 1:
                row = seq * TABLE_HEADS + kv_head
            i_begin = tl.program_id(2)
            i_end = 0
            is_split = num_splits > 1
        q_begin = tl.load(tensors.starts_ptr + seq)
        q_len = tl.load(tensors.starts_ptr + seq + 1) - q_begin
        seq_len = tl.load(tensors.seq_lens_ptr + seq)
        info_ptr, tiles_ptr, ranks_ptr = _plan_rows(plan_ptr, row, num_rows, max_tiles, max_items)
        if not DECODE:
            split_row = (tl.cast(tl.program_id(2), tl.int64) * num_tokens + q_begin) * traits.NUM_HEADS
            first_tile = tl.cast(tl.cast(q_begin, tl.int64) * GROUP // tile.BLOCK_M, tl.int32) + seq
            row_begin = (item - first_tile) * tile.BLOCK_M
        active = row_begin < q_len * GROUP
        if not DECODE:
            active = active & (q_len > decode_queries)
        if active:
            flags = tl.load(info_ptr + INFO_FLAGS)
            table_ptr = _table_of(tensors.tables_ptr, seq, kv_head, strides.stride_bt, strides.stride_bh, TABLE_HEADS)
            sequence = Sequence(
                table_ptr, tiles_ptr, ranks_ptr, (flags & DEAD_TILES) != 0, (flags & PARTIAL_TILES) != 0,
                q_begin, q_len, seq_len,
            )  # fmt: skip
            _attend_rows(
                tensors, strides, sequence, row_begin, kv_head, part, i_begin, i_end, split_row, is_split, num_splits,
                scale, terms, mask, key_begin, traits, tile, DECODE, SPLIT_TILES, SPLIT_HEADS, TWO_LOOPS,
            )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _merge_splits_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    lse_ptr,  # [num_tokens, NUM_HEADS]
    decode_ptr, decode_lse_ptr,  # [items, max_q, NUM_HEADS // TABLE_HEADS, VALUE_DIM] and its base-2 lse
    prefill_ptr, prefill_lse_ptr,  # [num_splits, num_tokens, NUM_HEADS, VALUE_DIM] and its base-2 lse
    starts_ptr, plan_ptr, sinks_ptr,
    num_seqs, num_tokens, decode_queries, max_q, num_splits, by_sequence,
    TABLE_HEADS: tl.constexpr, SINKS: tl.constexpr, WITH_LSE: tl.constexpr, NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merge splits. The grid is (rows, heads, parts of a head).

    A program merges BLOCK_S splits at once, in the order of their keys. With by_sequence, rows are max_q queries of
    each sequence, and only decodes have splits. Otherwise rows are all tokens.
    """
    head = tl.program_id(1)
    first_v = tl.program_id(2) * BLOCK_V
    if by_sequence != 0:
        seq = tl.program_id(0) // max_q
        q_begin = tl.load(starts_ptr + seq)
        token = q_begin + tl.program_id(0) % max_q
    else:
        token = tl.program_id(0)
        seq = _find_sequence(starts_ptr, num_seqs, token, 0, 1, 1)
        q_begin = tl.load(starts_ptr + seq)
    q_len = tl.load(starts_ptr + seq + 1) - q_begin
    exists = token < q_begin + q_len
    count = num_splits
    step = tl.cast(num_tokens, tl.int64) * NUM_HEADS
    first = tl.cast(token, tl.int64) * NUM_HEADS
    source_ptr = prefill_ptr
    source_lse_ptr = prefill_lse_ptr
    source_head = head
    if exists & (q_len <= decode_queries):
        HEADS: tl.constexpr = NUM_HEADS // TABLE_HEADS
        plan_row = tl.cast(seq, tl.int64)
        if TABLE_HEADS > 1:
            plan_row = plan_row * TABLE_HEADS + head // HEADS
            source_head = head % HEADS
        info_ptr = _plan_parts(plan_ptr, num_seqs * TABLE_HEADS, 0, 0)[0] + plan_row * INFO
        count = tl.load(info_ptr + INFO_ITEMS)
        step = tl.cast(max_q, tl.int64) * HEADS
        first = tl.load(info_ptr + INFO_FIRST) * step + tl.cast(token - q_begin, tl.int64) * HEADS
        source_ptr = decode_ptr
        source_lse_ptr = decode_lse_ptr
    if exists & (count > 1):
        offs_s = tl.arange(0, BLOCK_S)
        offs_v = first_v + tl.arange(0, BLOCK_V)
        m = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_V], tl.float32)
        for begin in range(0, count, BLOCK_S):
            live = begin + offs_s < count
            row = first + (begin + offs_s).to(tl.int64) * step + source_head
            part_lse = tl.load(source_lse_ptr + row, mask=live, other=float("-inf"))
            part = tl.load(
                source_ptr + row[:, None] * VALUE_DIM + offs_v[None, :],
                mask=live[:, None] & (offs_v[None, :] < VALUE_DIM), other=0.0,
            )  # fmt: skip
            m_new = tl.maximum(m, tl.max(part_lse, 0))
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m - safe)
            weight = tl.exp2(part_lse - safe)
            # This fma keeps the compiler from fusing a plain product with the first addition of the lane that holds it.
            # Otherwise, lanes that write one sum to one place of shared memory differ in the last bit.
            weighted = tl.fma(part, weight[:, None], 0.0)
            acc = acc * alpha[:, None] + tl.sum(weighted, 0)[None, :]
            total = total * alpha + tl.sum(weight, 0)
            m = m_new
        tokens = tl.zeros([1], tl.int64) + token
        _finish(
            acc, m, total, sinks_ptr, out_ptr, lse_ptr, tokens, tl.zeros([1], tl.int32) + head, tokens >= 0, first_v,
            SINKS, WITH_LSE, NUM_HEADS, VALUE_DIM, BLOCK_V,
        )  # fmt: skip
