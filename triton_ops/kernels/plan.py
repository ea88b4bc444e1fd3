"""The kernels that build a step's plan: the live tiles of each sequence and a balanced list of decode work.

`_attention/layout.py` explains rows, live tiles and ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._attention.parameters import UNSPECIALIZED
from .._attention.predicate import Mask
from .bundles import kernel
from .layout import (
    DEAD_TILES,
    INFO,
    INFO_ATTENDED,
    INFO_CHECKSUM,
    INFO_FIRST,
    INFO_FLAGS,
    INFO_ITEMS,
    INFO_LIVE,
    INFO_QUERY_LEN,
    INFO_SEQ_LEN,
    ITEM,
    ITEM_BEGIN,
    ITEM_COUNT,
    ITEM_END,
    ITEM_ROW,
    PARTIAL_TILES,
    TILE,
    _plan_parts,
    _plan_rows,
)
from .predicate import _span


@kernel(UNSPECIALIZED, mask=Mask)
def _plan_tiles_kernel(
    plan_ptr, tables_ptr, seq_lens_ptr, starts_ptr, positions_ptr,
    num_rows, max_tiles, max_items, mask, key_begin, stride_bt, stride_bh,
    DECODE_Q: tl.constexpr, POSITIONS: tl.constexpr, TABLE_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Write a row's live tiles, their ranks, and how many of them a decode attends to. Grid (num_rows,)."""
    row = tl.cast(tl.program_id(0), tl.int64)
    info_ptr, tiles_ptr, ranks_ptr = _plan_rows(plan_ptr, row, num_rows, max_tiles, max_items)
    seq = row // TABLE_HEADS
    tables_ptr += seq * stride_bt
    if TABLE_HEADS > 1:
        tables_ptr += row % TABLE_HEADS * stride_bh
    q_begin = tl.load(starts_ptr + seq)
    q_len = tl.load(starts_ptr + seq + 1) - q_begin
    seq_len = tl.load(seq_lens_ptr + seq)
    checksum = 0
    if POSITIONS:
        for base in range(0, q_len, BLOCK_T):
            offs = base + tl.arange(0, BLOCK_T)
            pos = tl.load(positions_ptr + q_begin + offs, mask=offs < q_len, other=0)
            checksum += tl.sum(pos * (2 * offs + 1), 0)
    p_first = seq_len - q_len
    p_last = seq_len - 1
    decoded = (q_len > 0) & (q_len <= DECODE_Q)
    if POSITIONS:
        p_first = tl.load(positions_ptr + q_begin, mask=decoded, other=0)
        p_last = tl.load(positions_ptr + q_begin + q_len - 1, mask=decoded, other=0)
    _, _, tile_lo, tile_hi, sink_lo, sink_hi = _span(p_first, p_last, seq_len, key_begin, mask)
    # A tile overlaps up to SUB blocks. A block may start or end inside a tile.
    blocks = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    num_tiles = (seq_len + TILE - 1) // TILE
    live_before = 0
    attended = 0
    partial = 0
    offs_s = tl.arange(0, SUB)
    for base in range(0, num_tiles + 1, BLOCK_T):
        tile = base + tl.arange(0, BLOCK_T)
        block = tile[:, None] * TILE // BLOCK_SIZE + offs_s[None, :]
        expected = (block * BLOCK_SIZE < tile[:, None] * TILE + TILE) & (block < blocks) & (tile[:, None] < num_tiles)
        number = tl.load(tables_ptr + block, mask=expected, other=-1)
        present = tl.sum((number >= 0).to(tl.int32), 1)
        live = tl.where(present > 0, 1, 0)
        rank = live_before + tl.cumsum(live, 0) - live
        partial += tl.sum(((live > 0) & (present < tl.sum(expected.to(tl.int32), 1))).to(tl.int32), 0)
        in_window = (tile >= tile_lo) & (tile < tile_hi)
        in_sinks = (tile >= sink_lo) & (tile < sink_hi)
        attended += tl.sum(live * (in_window | in_sinks).to(tl.int32), 0)
        tl.store(ranks_ptr + tile, rank, mask=tile <= num_tiles)
        tl.store(tiles_ptr + rank, tile, mask=live > 0)
        live_before += tl.sum(live, 0)
    flags = tl.where(live_before < num_tiles, DEAD_TILES, 0) + tl.where(partial > 0, PARTIAL_TILES, 0)
    tl.store(info_ptr + INFO_FLAGS, flags)
    tl.store(info_ptr + INFO_ATTENDED, tl.where(decoded, attended, 0))
    tl.store(info_ptr + INFO_CHECKSUM, checksum)
    tl.store(info_ptr + INFO_QUERY_LEN, q_len)
    tl.store(info_ptr + INFO_SEQ_LEN, seq_len)
    tl.store(info_ptr + INFO_LIVE, live_before)


@triton.jit
def _item_counts(plan_ptr, offs, num_rows, target, DECODE_Q: tl.constexpr):
    """Return the number of work items of rows `offs`, and of live tiles that they attend to."""
    mask = offs < num_rows
    info_ptr = _plan_parts(plan_ptr, num_rows, 0, 0)[0] + offs.to(tl.int64) * INFO
    attended = tl.load(info_ptr + INFO_ATTENDED, mask=mask, other=0)
    q_len = tl.load(info_ptr + INFO_QUERY_LEN, mask=mask, other=0)
    decoded = mask & (q_len > 0) & (q_len <= DECODE_Q)
    return tl.where(decoded, tl.maximum((attended + target - 1) // target, 1), 0), attended


@kernel(UNSPECIALIZED, mask=Mask)
def _plan_items_kernel(
    plan_ptr, num_rows, target_items, extra_items, mask, key_begin,
    DECODE_Q: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Split the live tiles of all decodes into work items of about equal length. Grid (num_rows,)."""
    row = tl.program_id(0)
    total = 0
    for base in range(0, num_rows, BLOCK_S):
        total += tl.sum(_item_counts(plan_ptr, base + tl.arange(0, BLOCK_S), num_rows, 1, DECODE_Q)[1], 0)
    target_items = tl.maximum(tl.minimum(target_items, extra_items), 1)
    target = tl.maximum((total + target_items - 1) // target_items, MIN_TILES)
    first = 0
    count = 0
    for base in range(0, num_rows, BLOCK_S):
        offs = base + tl.arange(0, BLOCK_S)
        counts, _ = _item_counts(plan_ptr, offs, num_rows, target, DECODE_Q)
        first += tl.sum(tl.where(offs < row, counts, 0), 0)
        count += tl.sum(counts, 0)
    own, attended = _item_counts(plan_ptr, row + tl.arange(0, 1), num_rows, target, DECODE_Q)
    items = tl.sum(own, 0)
    per = (tl.sum(attended, 0) + tl.maximum(items, 1) - 1) // tl.maximum(items, 1)
    info_ptr, items_ptr, _, _ = _plan_parts(plan_ptr, num_rows, 0, 0)
    info_ptr += tl.cast(row, tl.int64) * INFO
    tl.store(info_ptr + INFO_FIRST, first)
    tl.store(info_ptr + INFO_ITEMS, items)
    items_ptr += tl.cast(first, tl.int64) * ITEM
    for base in range(0, items, BLOCK_S):
        split = base + tl.arange(0, BLOCK_S)
        exists = split < items
        begin = tl.minimum(split * per, tl.sum(attended, 0))
        end = tl.minimum(begin + per, tl.sum(attended, 0))
        tl.store(items_ptr + split * ITEM + ITEM_ROW, tl.zeros_like(split) + row, mask=exists)
        tl.store(items_ptr + split * ITEM + ITEM_BEGIN, begin, mask=exists)
        tl.store(items_ptr + split * ITEM + ITEM_END, end, mask=exists)
        tl.store(items_ptr + split * ITEM + ITEM_COUNT, tl.zeros_like(split) + items, mask=exists)
    if row == 0:
        tl.store(plan_ptr, count)
        tl.store(plan_ptr + 1, DECODE_Q)
        tl.store(plan_ptr + 2, key_begin)
        for i in tl.static_range(len(mask)):
            tl.store(plan_ptr + 3 + i, tl.cast(mask[i], tl.int32))
