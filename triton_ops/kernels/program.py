"""The work of one program of the attention kernel: its rows' queries, the tiles they attend to, and their results.

`_span` turns the predicate into at most two ranges of tiles: sink tokens and window. The plan's ranks remove dead tiles
from them. The remaining tiles are numbered 0, 1, 2, ...; `_walk` and splits use these numbers, so that a dead tile is
never visited.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .layout import TILE
from .mainloop import E4M3_BITS, PLAIN_CACHE, CachedHead, LiveTiles, Queries, TreeRows, Walk, _first_tile, _walk
from .predicate import _attending_from, _full_span, _row_spans, _sink_tiles, _span
from .scores import _finish, _product_factor, _slopes


class Sequence(NamedTuple):
    """A sequence of the batch: its table, its live tiles in the plan, and its lengths."""

    table_ptr: Any
    tiles_ptr: Any
    ranks_ptr: Any
    has_holes: Any
    has_partial: Any
    q_begin: Any
    q_len: Any
    seq_len: Any


class TileRows(NamedTuple):
    """The rows of a tile, one query token and one head each, and the positions of the first and last token."""

    token: Any  # [BLOCK_M], counted from the sequence's first query
    head: Any  # [BLOCK_M]
    mask_m: Any  # [BLOCK_M], False for rows past the last query
    pos: Any  # [BLOCK_M]
    p_first: Any
    p_last: Any


class AttendedTiles(NamedTuple):
    """The tiles that rows attend to: those of the window, and those of sink tokens.

    The window has keys [lo, hi) in tiles [tile_lo, tile_hi). It has n_window live tiles, which begin at rank rank_lo.
    Sink tokens have n_sink live tiles, which begin at rank_sink. If the window's tiles include those of sink tokens,
    sink_end is the end of the latter; otherwise it is 0.
    """

    lo: Any
    hi: Any
    tile_lo: Any
    tile_hi: Any
    sink_end: Any
    rank_lo: Any
    n_window: Any
    rank_sink: Any
    n_sink: Any


@triton.jit
def _rank(sequence, tile):
    """Return the number of live tiles of a sequence before `tile`."""
    return tl.load(sequence.ranks_ptr + tile, mask=sequence.has_holes, other=tile)


@triton.jit
def _tile_rows(positions_ptr, sequence, row_begin, kv_head, traits, BLOCK_M: tl.constexpr, DECODE: tl.constexpr):
    """Return rows row_begin to row_begin + BLOCK_M of a sequence and KV head."""
    row = row_begin + tl.arange(0, BLOCK_M)
    # An unsigned number is divided by a power of two in one instruction.
    token = (row.to(tl.uint32) // traits.GROUP).to(tl.int32)
    head = kv_head * traits.GROUP + (row.to(tl.uint32) % traits.GROUP).to(tl.int32)
    mask_m = token < sequence.q_len
    first = row_begin // traits.GROUP
    last = tl.minimum(sequence.q_len - 1, (row_begin + BLOCK_M - 1) // traits.GROUP)
    if DECODE:
        # All row tiles of the sequence share the splits, so the span is that of the whole sequence.
        first = 0
        last = sequence.q_len - 1
    if traits.POSITIONS:
        pos = tl.load(positions_ptr + sequence.q_begin + token, mask=mask_m, other=0)
        if DECODE:
            p_first = tl.load(positions_ptr + sequence.q_begin)
            p_last = tl.load(positions_ptr + sequence.q_begin + last)
        else:
            p_first = tl.min(tl.where(mask_m, pos, 2147483647), 0)
            p_last = tl.max(tl.where(mask_m, pos, -1), 0)
    else:
        pos = sequence.seq_len - sequence.q_len + token
        p_first = sequence.seq_len - sequence.q_len + first
        p_last = sequence.seq_len - sequence.q_len + last
    return TileRows(token, head, mask_m, pos, p_first, p_last)


@triton.jit
def _attended_tiles(sequence, rows, key_begin, mask, TREE: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the tiles that rows attend to, including those of absent blocks, and the ranks of the live ones."""
    span_first = rows.p_first
    span_last = rows.p_last
    if TREE:
        # All of the call's own tokens are attended, wherever the window of the shallowest query starts.
        span_last = tl.maximum(rows.p_last, sequence.seq_len - 1)
        if mask.BOUNDED:
            span_first = _attending_from(rows.p_first, sequence.seq_len - sequence.q_len, mask)
    lo, hi, tile_lo, tile_hi, sink_lo, sink_hi = _span(span_first, span_last, sequence.seq_len, key_begin, mask)
    sink_end = 0
    if SEGMENTS:
        # The tiles of sink tokens are one more segment, which may lie inside the hull of the windows.
        sink_end = _sink_tiles(hi, key_begin, mask)
        tile_lo = tl.where(sink_end > 0, tl.minimum(tile_lo, key_begin // TILE), tile_lo)
        lo = tl.where(sink_end > 0, tl.minimum(lo, key_begin), lo)
        tile_hi = tl.maximum(tile_hi, sink_end)
    rank_lo = _rank(sequence, tile_lo)
    n_window = _rank(sequence, tile_hi) - rank_lo
    n_sink = 0
    rank_sink = 0
    if mask.BOUNDED and not SEGMENTS:
        rank_sink = _rank(sequence, sink_lo)
        n_sink = _rank(sequence, sink_hi) - rank_sink
    return AttendedTiles(lo, hi, tile_lo, tile_hi, sink_end, rank_lo, n_window, rank_sink, n_sink)


@triton.jit
def _split_of_tiles(split, num_splits, attended, SPLIT_TILES: tl.constexpr):
    """Return the live tiles [i_begin, i_end) of a prefill's split, counted from the first that its rows attend to."""
    n = attended.n_sink + attended.n_window
    if SPLIT_TILES > 0:
        # Splits start at fixed ranks of the sequence, so that a row's bits do not depend on its tile.
        a = split * SPLIT_TILES
        b = a + SPLIT_TILES
        i_begin = tl.minimum(tl.maximum(a - attended.rank_lo, 0), attended.n_window)
        i_end = tl.minimum(tl.maximum(b - attended.rank_lo, 0), attended.n_window)
        i_begin += tl.minimum(tl.maximum(a - attended.rank_sink, 0), attended.n_sink)
        i_end += tl.minimum(tl.maximum(b - attended.rank_sink, 0), attended.n_sink)
    else:
        per = (n + num_splits - 1) // num_splits
        i_begin = tl.minimum(split * per, n)
        i_end = tl.minimum(i_begin + per, n)
    return i_begin, i_end


@triton.jit
def _load_query(pointers, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load WIDTH columns of queries at these pointers."""
    offs_d = tl.arange(0, BLOCK_D)
    pointers += offs_d[None, :]
    if WIDTH == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=tl.broadcast_to(offs_d[None, :] < WIDTH, pointers.shape), other=0.0)


@triton.jit
def _exponents(q, other, rest, traits, tile):
    """Return the power of two of each row's largest number, as the bits of its exponent."""
    top = tl.max(tl.abs(q.to(tl.float32)), 1)
    if tile.VALUE_SPLITS > 1:
        top = tl.maximum(top, tl.max(tl.abs(other.to(tl.float32)), 1))
    if traits.ROPE_COLUMNS > 0:
        top = tl.maximum(top, tl.max(tl.abs(rest.to(tl.float32)), 1))
    # Within these bounds the power and its inverse are normal numbers, given by their exponents alone.
    top = tl.minimum(tl.maximum(top, 2.0**-120), 2.0**126)
    return top.to(tl.int32, bitcast=True) & 0x7F800000


@triton.jit
def _scaled_columns(q, qk_scale, exponent, terms, SCALES: tl.constexpr, ROWS: tl.constexpr):
    """Return columns of queries, negated if their factor is negative.

    ROWS: divide each row by its power of two, given by `exponent`, and convert it to float16.
    """
    if SCALES > 0:
        q = tl.where(qk_scale < 0, -q, q)
    elif terms.NEGATIVE:
        q = -q
    if ROWS:
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        q = (q.to(tl.float32) * inverse[:, None]).to(tl.float16)
    return q


@triton.jit
def _scaled_queries(q, other, rest, scale, k_scale_ptr, kv_head, terms, traits, tile, ROWS: tl.constexpr):
    """Return queries, with other parts of latent rows, and the factor of their products (ROWS: one for each row)."""
    qk_scale = scale
    if traits.SCALES > 0:
        qk_scale *= tl.cast(tl.load(k_scale_ptr + kv_head * (traits.SCALES - 1)), tl.float32)
    if traits.CODES >= E4M3_BITS:
        qk_scale *= 256.0
    # A softmax step takes the maximum before it multiplies, and -inf times 0 is NaN, so the factor is made positive.
    # Scores are scaled, not queries: unchanged queries can go to the matrix unit from shared memory.
    factor = _product_factor(tl.maximum(tl.abs(qk_scale), 1e-30), terms)
    exponent = 0
    if ROWS:
        # Codes are exact in float16, which takes one instruction for two codes where bfloat16 takes four.
        exponent = _exponents(q, other, rest, traits, tile)
        factor = factor * exponent.to(tl.float32, bitcast=True)
    q = _scaled_columns(q, qk_scale, exponent, terms, traits.SCALES, ROWS)
    if tile.VALUE_SPLITS > 1:
        other = _scaled_columns(other, qk_scale, exponent, terms, traits.SCALES, ROWS)
    if traits.ROPE_COLUMNS > 0:
        rest = _scaled_columns(rest, qk_scale, exponent, terms, traits.SCALES, ROWS)
    return q, other, rest, factor


@triton.jit
def _full_tiles(sequence, rows, attended, own_begin, key_begin, mask, i_begin, i_end, TREE: tl.constexpr):
    """Return which live tiles in [i_begin, i_end) every row attends to in full.

    A tile with an absent block is not full.
    """
    full_lo, full_hi = _full_span(rows.p_first, rows.p_last, sequence.seq_len, key_begin, mask)
    if TREE:
        full_hi = tl.minimum(full_hi, own_begin)
    x_lo = tl.minimum(tl.maximum((full_lo + TILE - 1) // TILE, attended.tile_lo), attended.tile_hi)
    x_hi = tl.minimum(tl.maximum(full_hi, 0) // TILE, attended.tile_hi)
    full_begin = tl.maximum(attended.n_sink + _rank(sequence, x_lo) - attended.rank_lo, i_begin)
    full_begin = tl.minimum(full_begin, i_end)
    full_end = tl.minimum(attended.n_sink + _rank(sequence, tl.maximum(x_hi, x_lo)) - attended.rank_lo, i_end)
    full_end = tl.where(sequence.has_partial, full_begin, tl.maximum(full_end, full_begin))
    return full_begin, full_end


@triton.jit
def _walk_segments(m, total, acc, i_begin, i_end, walk, sequence, rows, attended, BLOCK_N: tl.constexpr):
    """Run `_walk` for queries further apart than the window, over the union of their windows instead of its hull."""
    first_key, end_key = _row_spans(rows.pos, sequence.seq_len, walk.key_begin, walk.mask)
    first_tile = tl.maximum(first_key, 0) // TILE
    end_tile = tl.where(end_key > first_key, (end_key + TILE - 1) // TILE, 0)
    end_tile = tl.where(rows.mask_m, end_tile, 0)
    segment = tl.min(tl.where(rows.mask_m & (end_tile > 0), first_tile, 2147483647), 0)
    segment = tl.where(attended.sink_end > 0, attended.tile_lo, segment)
    while segment < 2147483647:
        # A window that starts inside or at the end of the segment extends it.
        end = segment - 1
        grown = tl.maximum(segment, attended.sink_end)
        while grown > end:
            end = grown
            grown = tl.maximum(end, tl.max(tl.where(first_tile <= end, end_tile, 0), 0))
        segment_begin = tl.maximum(_rank(sequence, segment) - attended.rank_lo, i_begin)
        segment_end = tl.minimum(_rank(sequence, end) - attended.rank_lo, i_end)
        m, total, acc = _walk(m, total, acc, segment_begin, segment_end, segment_end, 0, walk, True, True, BLOCK_N)
        segment = tl.min(tl.where(rows.mask_m & (end_tile > 0) & (first_tile > end), first_tile, 2147483647), 0)
    return m, total, acc


@triton.jit
def _attend_tiles(
    i_begin, i_end, walk, sequence, rows, attended, BLOCK_N: tl.constexpr, TWO_LOOPS: tl.constexpr,
    SEGMENTS: tl.constexpr, SCATTERED: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Return the online softmax of rows over the live tiles [i_begin, i_end) that they attend to."""
    BLOCK_M: tl.constexpr = walk.queries.q.shape[0]
    CODED: tl.constexpr = walk.cache.CODES != PLAIN_CACHE
    LAZY: tl.constexpr = walk.queries.LAZY
    # Sums of more columns leave few registers.
    WIDE: tl.constexpr = walk.cache.BLOCK_V > 128
    # Steps that need a mask take one tile at most, because dead tiles may lie between two.
    WIDEST: tl.constexpr = TILE if walk.cache.VALUE_SPLITS == 1 and not WIDE else TILE // 2
    EDGE_N: tl.constexpr = BLOCK_N if BLOCK_N < WIDEST else WIDEST
    # Whether to compute the last tile first. Scores with more terms than product and mask leave no registers for it.
    LAST_FIRST: tl.constexpr = (
        TWO_LOOPS and not (DECODE or walk.TREE or CODED or WIDE) and walk.terms.PLAIN and walk.cache.ROPE_COLUMNS == 0
    )
    if LAST_FIRST:
        # The last tile nearly always needs a mask. Computed first, outside of the loop, it needs no rescaling.
        i_last = tl.maximum(i_end - 1, i_begin)
        m, total, acc = _first_tile(i_last, i_end, walk, SCATTERED, EDGE_N)
        i_end = i_last
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_N] if LAZY else [BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, walk.cache.BLOCK_V], tl.float32)

    full_begin = i_begin
    full_end = i_begin
    if TWO_LOOPS:
        full_begin, full_end = _full_tiles(
            sequence, rows, attended, walk.tree.own_begin, walk.key_begin, walk.mask, i_begin, i_end, walk.TREE
        )
        if BLOCK_N > TILE:
            full_end -= (full_end - full_begin) % (BLOCK_N // TILE)
        if DECODE or walk.cache.ROPE_COLUMNS > 0 or (full_end > full_begin):
            m, total, acc = _walk(
                m, total, acc, full_begin, full_end, full_end, 0, walk, False, False, BLOCK_N
            )  # fmt: skip
    skip = full_end - full_begin
    if SEGMENTS:
        m, total, acc = _walk_segments(m, total, acc, i_begin, i_end, walk, sequence, rows, attended, EDGE_N)
    # Most splits of a decode skip these steps. With codes, there are no registers for the check.
    elif not TWO_LOOPS or (DECODE and CODED) or (i_end - skip > i_begin):
        m, total, acc = _walk(
            m, total, acc, i_begin, i_end - skip, full_begin, skip, walk, True, SCATTERED, EDGE_N
        )  # fmt: skip
    if LAZY:
        total = tl.sum(total, 1)
    return m, total, acc


@triton.jit
def _columns_beside(part, traits, tile):
    """Return the distances, in columns, from a part of a latent row to the other part and to the rest."""
    if tile.VALUE_SPLITS > 1:
        return (1 - 2 * part) * tile.BLOCK_D, (2 - part) * tile.BLOCK_D
    else:
        return 0, traits.HEAD_DIM


@triton.jit
def _attend_rows(
    tensors, strides, sequence, row_begin, kv_head, part, i_begin, i_end, split_row, is_split, num_splits,
    scale, terms, mask, key_begin, traits, tile,
    DECODE: tl.constexpr, SPLIT_TILES: tl.constexpr, SPLIT_HEADS: tl.constexpr, TWO_LOOPS: tl.constexpr,
):  # fmt: skip
    """Attend with rows row_begin to row_begin + BLOCK_M of one sequence and KV head, over live tiles [i_begin, i_end).

    In a prefill i_begin is the number of the split.
    """
    CODES: tl.constexpr = traits.CODES
    TREE: tl.constexpr = traits.TREE
    SEGMENTS: tl.constexpr = traits.POSITIONS and mask.BOUNDED and not DECODE and not TREE
    SCATTERED: tl.constexpr = TREE or (traits.POSITIONS and mask.BOUNDED)
    ROWS: tl.constexpr = CODES != PLAIN_CACHE and tensors.query_ptr.dtype.element_ty == tl.bfloat16
    # LAZY: a total for each key of a tile. Sums of many rows of 512 columns leave no registers for it.
    LAZY: tl.constexpr = DECODE and (traits.ROPE_COLUMNS == 0 or tile.BLOCK_M == 16)
    SHIFT: tl.constexpr = 15 if ROWS or tensors.query_ptr.dtype.element_ty == tl.float16 else 0
    rows = _tile_rows(tensors.positions_ptr, sequence, row_begin, kv_head, traits, tile.BLOCK_M, DECODE)
    own_begin = 0
    tree_rows = tensors.tree_ptr
    own_positions_ptr = None
    if TREE:
        own_begin = sequence.seq_len - sequence.q_len
        row_of_tree = (sequence.q_begin + tl.where(rows.mask_m, rows.token, 0)).to(tl.int64)
        tree_rows = tensors.tree_ptr + row_of_tree * strides.stride_tree
        if traits.POSITIONS:
            own_positions_ptr = tensors.positions_ptr + sequence.q_begin
    attended = _attended_tiles(sequence, rows, key_begin, mask, TREE, SEGMENTS)
    if not DECODE:
        i_begin, i_end = _split_of_tiles(i_begin, num_splits, attended, SPLIT_TILES)
    i_end = tl.minimum(i_end, attended.n_sink + attended.n_window)

    q_token = sequence.q_begin + rows.token
    # Rows after the last query repeat the last one: they need no mask, and nothing of theirs is written.
    q_rows = (sequence.q_begin + tl.minimum(rows.token, sequence.q_len - 1)).to(tl.int64)
    head = rows.head.to(tl.int64)
    q_ptrs = tensors.query_ptr + q_rows[:, None] * strides.stride_qt + head[:, None] * strides.stride_qh
    other_at, rest_at = _columns_beside(part, traits, tile)
    key_at = part * tile.BLOCK_D
    q = _load_query(q_ptrs + key_at, traits.HEAD_DIM, tile.BLOCK_D)
    other = q
    rest = q
    if tile.VALUE_SPLITS > 1:
        other = _load_query(q_ptrs + key_at + other_at, traits.HEAD_DIM, tile.BLOCK_D)
    if traits.ROPE_COLUMNS > 0:
        rest = _load_query(q_ptrs + key_at + rest_at, traits.ROPE_COLUMNS, tile.BLOCK_R)
    key_ptr = tensors.key_ptr + tl.cast(kv_head, tl.int64) * strides.stride_kh + key_at
    value_ptr = tensors.value_ptr + tl.cast(kv_head, tl.int64) * strides.stride_vh
    q, other, rest, factor = _scaled_queries(
        q, other, rest, scale, tensors.k_scale_ptr, kv_head, terms, traits, tile, ROWS
    )  # fmt: skip
    slope = _slopes(tensors.alibi_ptr, rows.head, rows.mask_m, terms)
    m, total, acc = _attend_tiles(
        i_begin, i_end,
        Walk(
            Queries(
                q, other, rest, rows.pos, slope, factor, traits.UPCAST, ROWS, LAZY, SHIFT,
                tile.VALUE_SPLITS, traits.ROPE_COLUMNS,
            ),
            CachedHead(
                key_ptr, value_ptr, strides.stride_kb, strides.stride_kt, strides.stride_vb, strides.stride_vt,
                other_at, rest_at, CODES, traits.BLOCK_SIZE, traits.HEAD_DIM, traits.VALUE_DIM, traits.ROPE_COLUMNS,
                tile.BLOCK_D, tile.BLOCK_V, tile.BLOCK_R, tile.VALUE_SPLITS,
            ),
            LiveTiles(
                sequence.table_ptr, sequence.tiles_ptr, sequence.has_holes,
                attended.rank_lo, attended.n_sink, attended.rank_sink,
            ),
            TreeRows(tree_rows, own_begin, strides.tree_keys, own_positions_ptr),
            mask, terms, attended.lo, attended.hi, key_begin, TREE,
        ),
        sequence, rows, attended, tile.BLOCK_N, TWO_LOOPS, SEGMENTS, SCATTERED, DECODE,
    )  # fmt: skip
    _end_rows(
        acc, m, total, tensors, kv_head, rows.token, q_token.to(tl.int64), rows.head, rows.mask_m, is_split, split_row,
        part * tile.BLOCK_V, traits, SPLIT_TILES > 0, SPLIT_HEADS, tile.BLOCK_V,
    )  # fmt: skip


@triton.jit
def _end_rows(
    acc, m, total, tensors, kv_head, token, q_token, head, mask_m, is_split, split_row, first_v, traits,
    EQUAL_SPLITS: tl.constexpr, SPLIT_HEADS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the rows of an online softmax from column first_v on: partial results at split_row, or final results."""
    if traits.SCALES > 0:
        acc *= tl.cast(tl.load(tensors.v_scale_ptr + kv_head * (traits.SCALES - 1)), tl.float32)
    if traits.CODES >= E4M3_BITS:
        acc *= 256.0
    if EQUAL_SPLITS:
        # A row with one split is rounded like a row with many, in the same order.
        safe_total = tl.where(total == 0, 1.0, total)
        acc = acc / safe_total[:, None]
        m += tl.log2(safe_total)
        total = tl.where(total == 0, 0.0, 1.0)
    if is_split:
        offs_v = first_v + tl.arange(0, BLOCK_V)
        denominator = tl.where(total == 0, 1.0, total)
        row_out = split_row + tl.cast(token, tl.int64) * SPLIT_HEADS + head
        tl.store(
            tensors.partial_ptr + row_out[:, None] * traits.VALUE_DIM + offs_v[None, :], acc / denominator[:, None],
            mask=mask_m[:, None] & (offs_v[None, :] < traits.VALUE_DIM),
        )  # fmt: skip
        # Both parts have the log-sum-exp, added in different orders, so only the first writes it.
        if first_v == 0:
            tl.store(tensors.partial_lse_ptr + row_out, m + tl.log2(denominator), mask=mask_m)
    else:
        _finish(
            acc, m, total, tensors.sinks_ptr, tensors.out_ptr, tensors.lse_ptr, q_token, head,
            mask_m, first_v, traits.SINKS, traits.WITH_LSE, traits.NUM_HEADS, traits.VALUE_DIM, BLOCK_V,
        )  # fmt: skip
