"""What one program of the attention kernel does with its rows: their queries, the tiles they reach, their result.

`_span` turns the predicate into at most two ranges of live tiles, sink tokens and window; the plan's ranks take the
absent tiles out of them. What is left is numbered 0, 1, 2, ... and is what `_walk` goes over and splits divide, so that
a dead tile is never visited.
"""

from __future__ import annotations

from .._triton import tl, triton
from .keys import PLAIN_CACHE, _rows_of_head
from .layout import TILE
from .predicate import _reaching, _row_spans, _sink_tiles, _span, _whole_span
from .scaling import _end_rows, _scaled_queries
from .scores import _slopes
from .walk import _first_tile, _walk


@triton.jit
def _rank(ranks_ptr, tile, has_holes):
    """How many live tiles a sequence has before `tile`."""
    return tl.load(ranks_ptr + tile, mask=has_holes, other=tile)


@triton.jit
def _attend_rows(
    query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, table_ptr, positions_ptr,
    alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, visits_ptr,
    tiles_ptr, ranks_ptr, has_holes, has_partial,
    q_begin, q_len, seq_len, row_begin, kv_head, i_begin, i_end, split_row, is_split, num_splits,
    scale, terms, mask, key_begin, num_blocks,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    tree_ptr, tree_keys, stride_tree,
    DECODE: tl.constexpr, SPLIT_TILES: tl.constexpr, POSITIONS: tl.constexpr,
    SINKS: tl.constexpr, SCALES: tl.constexpr, CODES: tl.constexpr, UPCAST: tl.constexpr, COUNT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, SPLIT_HEADS: tl.constexpr, TREE: tl.constexpr,
    WITH_LSE: tl.constexpr, TWO_LOOPS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Rows row_begin to row_begin + BLOCK_M of one sequence and KV head, over live tiles [i_begin, i_end)."""
    SEGMENTS: tl.constexpr = POSITIONS and mask.BOUNDED and not DECODE and not TREE
    # Steps of two tiles are for those that need no mask; they may lie apart where others between them are absent.
    EDGE_N: tl.constexpr = BLOCK_N if BLOCK_N < TILE else TILE
    SCATTERED: tl.constexpr = TREE or (POSITIONS and mask.BOUNDED)
    # Scores that take more than a product and a mask leave it no registers.
    LAST_FIRST: tl.constexpr = TWO_LOOPS and not (DECODE or TREE) and terms.PLAIN and CODES == PLAIN_CACHE
    offs_d = tl.arange(0, BLOCK_D)
    row = row_begin + tl.arange(0, BLOCK_M)
    # Unsigned numbers are divided by a power of two in one instruction.
    token = (row.to(tl.uint32) // GROUP).to(tl.int32)
    head = kv_head * GROUP + (row.to(tl.uint32) % GROUP).to(tl.int32)
    mask_m = token < q_len
    first = row_begin // GROUP
    last = tl.minimum(q_len - 1, (row_begin + BLOCK_M - 1) // GROUP)
    if DECODE:
        # Every row tile of the sequence shares the splits, so the span is the whole sequence's.
        first = 0
        last = q_len - 1
    if POSITIONS:
        pos = tl.load(positions_ptr + q_begin + token, mask=mask_m, other=0)
        if DECODE:
            p_first = tl.load(positions_ptr + q_begin)
            p_last = tl.load(positions_ptr + q_begin + last)
        else:
            p_first = tl.min(tl.where(mask_m, pos, 2147483647), 0)
            p_last = tl.max(tl.where(mask_m, pos, -1), 0)
    else:
        pos = seq_len - q_len + token
        p_first = seq_len - q_len + first
        p_last = seq_len - q_len + last
    own_begin = 0
    tree_rows = tree_ptr
    own_positions_ptr = None
    span_first = p_first
    span_last = p_last
    if TREE:
        # The call's own tokens are all within reach, wherever the window of the shallowest query begins.
        own_begin = seq_len - q_len
        tree_rows = tree_ptr + (q_begin + tl.where(mask_m, token, 0)).to(tl.int64) * stride_tree
        if POSITIONS:
            own_positions_ptr = positions_ptr + q_begin
        span_last = tl.maximum(p_last, seq_len - 1)
        if mask.BOUNDED:
            span_first = _reaching(p_first, own_begin, mask)
    lo, hi, tile_lo, tile_hi, sink_lo, sink_hi = _span(span_first, span_last, seq_len, key_begin, mask)
    sink_end = 0
    if SEGMENTS:
        # The tiles of sink tokens are one more segment, which may lie inside the hull of the windows.
        sink_end = _sink_tiles(hi, key_begin, mask)
        tile_lo = tl.where(sink_end > 0, tl.minimum(tile_lo, key_begin // TILE), tile_lo)
        lo = tl.where(sink_end > 0, tl.minimum(lo, key_begin), lo)
        tile_hi = tl.maximum(tile_hi, sink_end)
        sink_lo = tile_lo
        sink_hi = tile_lo
    rank_lo = _rank(ranks_ptr, tile_lo, has_holes)
    n_window = _rank(ranks_ptr, tile_hi, has_holes) - rank_lo
    n_sink = 0
    rank_sink = 0
    if mask.BOUNDED:
        rank_sink = _rank(ranks_ptr, sink_lo, has_holes)
        n_sink = _rank(ranks_ptr, sink_hi, has_holes) - rank_sink
    n = n_sink + n_window
    if not DECODE:
        if SPLIT_TILES > 0:
            # Splits at fixed ranks of the sequence, so that a row's bits do not depend on its tile.
            a = i_begin * SPLIT_TILES
            b = a + SPLIT_TILES
            i_begin = tl.minimum(tl.maximum(a - rank_lo, 0), n_window)
            i_end = tl.minimum(tl.maximum(b - rank_lo, 0), n_window)
            i_begin += tl.minimum(tl.maximum(a - rank_sink, 0), n_sink)
            i_end += tl.minimum(tl.maximum(b - rank_sink, 0), n_sink)
        else:
            per = (n + num_splits - 1) // num_splits
            i_begin = tl.minimum(i_begin * per, n)
            i_end = tl.minimum(i_begin + per, n)
    i_end = tl.minimum(i_end, n)

    q_token = q_begin + token
    # Rows past the last query are those of the last one again: no mask, and nothing of theirs is written.
    q_rows = (q_begin + tl.minimum(token, q_len - 1)).to(tl.int64)
    q_ptrs = query_ptr + q_rows[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :]
    if HEAD_DIM == BLOCK_D:
        q = tl.load(q_ptrs)
    else:
        q = tl.load(q_ptrs, mask=tl.broadcast_to(offs_d[None, :] < HEAD_DIM, q_ptrs.shape), other=0.0)
    key_ptr += tl.cast(kv_head, tl.int64) * stride_kh
    value_ptr += tl.cast(kv_head, tl.int64) * stride_vh
    key_source = key_ptr
    value_source = value_ptr
    if DESCRIPTORS:
        key_source, stride_kb = _rows_of_head(
            key_ptr, num_blocks, stride_kb, stride_kt, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D
        )
        value_source, stride_vb = _rows_of_head(
            value_ptr, num_blocks, stride_vb, stride_vt, BLOCK_SIZE, VALUE_DIM, BLOCK_N, BLOCK_V
        )
    ROWS: tl.constexpr = CODES != PLAIN_CACHE and query_ptr.dtype.element_ty == tl.bfloat16
    q, factor = _scaled_queries(q, scale, k_scale_ptr, kv_head, terms, SCALES, CODES, ROWS)
    SHIFT: tl.constexpr = 15 if ROWS or query_ptr.dtype.element_ty == tl.float16 else 0
    slope = _slopes(alibi_ptr, head, mask_m, terms)
    visits = tl.maximum(i_end - i_begin, 0)
    if LAST_FIRST:
        # The last tile, which nearly always needs a mask, needs no loop, and as the first of a sum no rescaling.
        i_last = tl.maximum(i_end - 1, i_begin)
        m, total, acc = _first_tile(
            q, pos, slope, i_last, i_end,
            tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, table_ptr, key_source, value_source,
            stride_kb, stride_kt, stride_vb, stride_vt,
            lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
            SCATTERED, TREE, CODES, UPCAST, DESCRIPTORS, ROWS, DECODE, SHIFT,
            BLOCK_SIZE, EDGE_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
        )  # fmt: skip
        i_end = i_last
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_N] if DECODE else [BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    full_begin = i_begin
    full_end = i_begin
    if TWO_LOOPS:
        # Tiles that every row attends to whole need no mask. A tile with an absent block never counts as one.
        full_lo, full_hi = _whole_span(p_first, p_last, seq_len, key_begin, mask)
        if TREE:
            full_hi = tl.minimum(full_hi, own_begin)
        x_lo = tl.minimum(tl.maximum((full_lo + TILE - 1) // TILE, tile_lo), tile_hi)
        x_hi = tl.minimum(tl.maximum(full_hi, 0) // TILE, tile_hi)
        full_begin = tl.maximum(n_sink + _rank(ranks_ptr, x_lo, has_holes) - rank_lo, i_begin)
        full_begin = tl.minimum(full_begin, i_end)
        full_end = tl.minimum(n_sink + _rank(ranks_ptr, tl.maximum(x_hi, x_lo), has_holes) - rank_lo, i_end)
        full_end = tl.where(has_partial, full_begin, tl.maximum(full_end, full_begin))
        if BLOCK_N > TILE:
            full_end -= (full_end - full_begin) % (BLOCK_N // TILE)
        if DECODE or (full_end > full_begin):
            m, total, acc = _walk(
                q, m, total, acc, pos, slope, full_begin, full_end, full_end, 0,
                tiles_ptr, rank_lo, n_sink, 0, has_holes, table_ptr, key_source, value_source,
                stride_kb, stride_kt, stride_vb, stride_vt,
                lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
                False, False, TREE, CODES, UPCAST, DESCRIPTORS, ROWS, DECODE, SHIFT,
                BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
            )  # fmt: skip
    skip = full_end - full_begin
    if SEGMENTS:
        visits = 0
        # Queries further apart than the window: walk over the union of their windows, not over its hull.
        first_key, end_key = _row_spans(pos, seq_len, key_begin, mask)
        first_tile = tl.maximum(first_key, 0) // TILE
        end_tile = tl.where(end_key > first_key, (end_key + TILE - 1) // TILE, 0)
        end_tile = tl.where(mask_m, end_tile, 0)
        segment = tl.min(tl.where(mask_m & (end_tile > 0), first_tile, 2147483647), 0)
        segment = tl.where(sink_end > 0, tile_lo, segment)
        while segment < 2147483647:
            # A window that begins inside or at the end of the segment extends it.
            reach = segment - 1
            grown = tl.maximum(segment, sink_end)
            while grown > reach:
                reach = grown
                grown = tl.maximum(reach, tl.max(tl.where(first_tile <= reach, end_tile, 0), 0))
            segment_begin = tl.maximum(_rank(ranks_ptr, segment, has_holes) - rank_lo, i_begin)
            segment_end = tl.minimum(_rank(ranks_ptr, reach, has_holes) - rank_lo, i_end)
            m, total, acc = _walk(
                q, m, total, acc, pos, slope, segment_begin, segment_end, segment_end, 0,
                tiles_ptr, rank_lo, 0, 0, has_holes, table_ptr, key_source, value_source,
                stride_kb, stride_kt, stride_vb, stride_vt,
                lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
                True, True, TREE, CODES, UPCAST, DESCRIPTORS, ROWS, DECODE, SHIFT,
                BLOCK_SIZE, EDGE_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
            )  # fmt: skip
            visits += tl.maximum(segment_end - segment_begin, 0)
            segment = tl.min(tl.where(mask_m & (end_tile > 0) & (first_tile > reach), first_tile, 2147483647), 0)
    # Few splits of a decode have such steps. (With codes, to ask takes registers that there are not.)
    elif not TWO_LOOPS or (DECODE and CODES != PLAIN_CACHE) or (i_end - skip > i_begin):
        m, total, acc = _walk(
            q, m, total, acc, pos, slope, i_begin, i_end - skip, full_begin, skip,
            tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, table_ptr, key_source, value_source,
            stride_kb, stride_kt, stride_vb, stride_vt,
            lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
            True, SCATTERED, TREE, CODES, UPCAST, DESCRIPTORS, ROWS, DECODE, SHIFT,
            BLOCK_SIZE, EDGE_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
        )  # fmt: skip
    if DECODE:
        total = tl.sum(total, 1)
    if COUNT:
        tl.atomic_add(visits_ptr, visits)

    _end_rows(
        acc, m, total, v_scale_ptr, kv_head, sinks_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
        q_token.to(tl.int64), head, mask_m, is_split, split_row, token,
        SPLIT_TILES > 0, SINKS, SCALES, CODES, WITH_LSE, NUM_HEADS, SPLIT_HEADS, VALUE_DIM, BLOCK_V,
    )  # fmt: skip
