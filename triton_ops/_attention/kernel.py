"""The attention kernel: one predicate and one tile loop for every operator, regime and option.

A program owns BLOCK_M rows, a row being one query token and one head of a KV head's group, and walks over key tiles of
TILE keys. `_span` turns the predicate into at most two ranges of live tiles, sink tokens and window; the plan's ranks
take the absent tiles out of them. What is left is numbered 0, 1, 2, ... and is what loops walk over and splits divide,
so that a dead tile is never visited. Scores are kept in base 2: exp2 is one instruction.
"""

from __future__ import annotations

from .._quantize import from_e4m3
from .._triton import tl, triton
from .layout import HEADER, INFO, ITEM, TILE
from .predicate import _span, _whole_tile_queries

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """Hyperbolic tangent to float32 accuracy, also near 0 where 1 - exp cancels."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    small = 1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * 0.021869488)))
    return tl.where(tl.abs(x) < 0.25, x * small, tl.where(x < 0, -large, large))


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
def _rank(ranks_ptr, tile, has_holes):
    """How many live tiles a sequence has before `tile`."""
    return tl.load(ranks_ptr + tile, mask=has_holes, other=tile)


@triton.jit
def _rows_of_head(
    ptr, num_blocks, stride_b, stride_t,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A head's keys or values as a matrix, and its rows from block to block: other heads' may be among them."""
    per_block = tl.cast(stride_b // stride_t, tl.int32)
    rows = tl.make_tensor_descriptor(
        ptr, shape=[(num_blocks - 1) * per_block + BLOCK_SIZE, HEAD_DIM], strides=[stride_t, 1],
        block_shape=[BLOCK_N, BLOCK_D],
    )  # fmt: skip
    return rows, per_block


@triton.jit
def _tile_step(
    q, m, total, acc, pos, slope, x, table_ptr, key_source, value_source, stride_kb, stride_kt, stride_vb, stride_vt,
    lo, hi, key_begin, window, num_sink_tokens, qk_scale, softcap,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SCATTERED: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: BLOCK_N keys from x * BLOCK_N on.

    Sources are pointers, or descriptors: then stride_kb and stride_vb count rows.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    t = x * BLOCK_N + offs_n
    if BLOCK_SIZE % BLOCK_N == 0:
        if MASKED:
            block = tl.load(table_ptr + x * BLOCK_N // BLOCK_SIZE, mask=x * BLOCK_N < hi, other=-1)
        else:
            block = tl.load(table_ptr + x * BLOCK_N // BLOCK_SIZE)
        block64 = tl.cast(block, tl.int64)
    else:
        if MASKED:
            block = tl.load(table_ptr + t // BLOCK_SIZE, mask=t < hi, other=-1)
        else:
            block = tl.load(table_ptr + t // BLOCK_SIZE)
        block64 = block.to(tl.int64)
    if not DESCRIPTORS:
        key_row = block64 * stride_kb + (t % BLOCK_SIZE) * stride_kt
        value_row = block64 * stride_vb + (t % BLOCK_SIZE) * stride_vt
        key_ptrs = key_source + key_row[:, None] + offs_d[None, :]
        value_ptrs = value_source + value_row[:, None] + offs_d[None, :]

    if MASKED:
        present = (t < tl.where(block >= 0, hi, 0)) & (t >= key_begin)
        if WINDOW:
            present &= (t >= lo) | (t < num_sink_tokens)
        live = present[None, :]
        if CAUSAL:
            live = live & (t[None, :] <= pos[:, None])
        if WINDOW:
            live = live & ((t[None, :] > pos[:, None] - window) | (t[None, :] < num_sink_tokens))
            if not CAUSAL:
                live = live & (t[None, :] < pos[:, None] + window)
            if SCATTERED:
                # Between far queries a tile holds keys that no row attends to: their memory may hold NaN.
                present = tl.max(tl.broadcast_to(live, [q.shape[0], BLOCK_N]).to(tl.int32), 0) > 0
    if DESCRIPTORS:
        # What lies outside of the cache or past HEAD_DIM reads as 0; what must not be seen inside of it is zeroed here.
        k = key_source.load([block * stride_kb + x * BLOCK_N % BLOCK_SIZE, 0])
        v = value_source.load([block * stride_vb + x * BLOCK_N % BLOCK_SIZE, 0])
        if MASKED:
            v = tl.where(present[:, None], v, 0.0).to(v.dtype)
    elif MASKED:
        mask = tl.broadcast_to(present[:, None], [BLOCK_N, BLOCK_D])
        if HEAD_DIM != BLOCK_D:
            mask = mask & (offs_d[None, :] < HEAD_DIM)
        k = tl.load(key_ptrs, mask=mask, other=0.0)
        v = tl.load(value_ptrs, mask=mask, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        mask = tl.broadcast_to(offs_d[None, :] < HEAD_DIM, [BLOCK_N, BLOCK_D])
        k = tl.load(key_ptrs, mask=mask, other=0.0)
        v = tl.load(value_ptrs, mask=mask, other=0.0)
    else:
        k = tl.load(key_ptrs)
        v = tl.load(value_ptrs)
    if FP8:
        k = from_e4m3(k)
        v = from_e4m3(v)
    # The interpreter multiplies bfloat16 as integers, so there the operands of a dot are float32.
    if UPCAST:
        score = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee") * qk_scale
    else:
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * qk_scale
    if SOFTCAP:
        score = _tanh(score) * softcap
    if ALIBI:
        score += slope[:, None] * (t[None, :] - pos[:, None]).to(tl.float32)
    if MASKED:
        score = tl.where(live, score, float("-inf"))
    m_new = tl.maximum(m, tl.max(score, 1))
    m_safe = m_new
    if MASKED:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(score - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if UPCAST:
        acc += tl.dot(p.to(q.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return m_new, total, acc


@triton.jit
def _finish(
    acc, m, total, sinks_ptr, out_ptr, lse_ptr, q_token, head, mask_m,
    SINKS: tl.constexpr, WITH_LSE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds the sinks to the denominator and writes out and lse of rows (q_token, head)."""
    offs_d = tl.arange(0, BLOCK_D)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=mask_m, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.exp2(sink - m_new)
        acc = acc * alpha[:, None]
        m = m_new
    denominator = tl.where(total == 0, 1.0, total)
    row = q_token * NUM_HEADS + head
    tl.store(
        out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :],
        (acc / denominator[:, None]).to(out_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_d[None, :] < HEAD_DIM),
    )
    if WITH_LSE:
        tl.store(lse_ptr + row, (m + tl.log2(denominator)) * LN2, mask=mask_m)


@triton.jit
def _attend_rows(
    query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, table_ptr, positions_ptr,
    alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, visits_ptr,
    tiles_ptr, ranks_ptr, has_holes, has_partial,
    q_begin, q_len, seq_len, row_begin, kv_head, i_begin, i_end, split_row, is_split, num_splits,
    scale, softcap, window, num_sink_tokens, key_begin, num_blocks,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    DECODE: tl.constexpr, SPLIT_TILES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, SCALES: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr, COUNT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WITH_LSE: tl.constexpr, TWO_LOOPS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Rows row_begin to row_begin + BLOCK_M of one sequence and KV head, over live tiles [i_begin, i_end)."""
    SEGMENTS: tl.constexpr = POSITIONS and WINDOW and not DECODE
    offs_d = tl.arange(0, BLOCK_D)
    row = row_begin + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
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
    lo, hi, tile_lo, tile_hi, sink_lo, sink_hi = _span(
        p_first, p_last, seq_len, key_begin, window, num_sink_tokens, CAUSAL, WINDOW
    )
    sink_end = 0
    if SEGMENTS:
        # The tiles of sink tokens are one more segment, which may lie inside the hull of the windows.
        sink_end = tl.where(num_sink_tokens > key_begin, (tl.minimum(num_sink_tokens, hi) + TILE - 1) // TILE, 0)
        tile_lo = tl.where(sink_end > 0, tl.minimum(tile_lo, key_begin // TILE), tile_lo)
        lo = tl.where(sink_end > 0, tl.minimum(lo, key_begin), lo)
        tile_hi = tl.maximum(tile_hi, sink_end)
        sink_lo = tile_lo
        sink_hi = tile_lo
    rank_lo = _rank(ranks_ptr, tile_lo, has_holes)
    n_window = _rank(ranks_ptr, tile_hi, has_holes) - rank_lo
    n_sink = 0
    rank_sink = 0
    if WINDOW:
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

    mask_q = mask_m[:, None] & (offs_d[None, :] < HEAD_DIM)
    q_token = q_begin + token
    q = tl.load(
        query_ptr + q_token.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :],
        mask=mask_q, other=0.0,
    )  # fmt: skip
    key_ptr += tl.cast(kv_head, tl.int64) * stride_kh
    value_ptr += tl.cast(kv_head, tl.int64) * stride_vh
    key_source = key_ptr
    value_source = value_ptr
    if DESCRIPTORS:
        key_source, stride_kb = _rows_of_head(
            key_ptr, num_blocks, stride_kb, stride_kt, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D
        )
        value_source, stride_vb = _rows_of_head(
            value_ptr, num_blocks, stride_vb, stride_vt, BLOCK_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D
        )
    qk_scale = scale
    if SCALES > 0:
        qk_scale *= tl.cast(tl.load(k_scale_ptr + kv_head * (SCALES - 1)), tl.float32)
    if SOFTCAP:
        qk_scale /= softcap
        softcap *= LOG2E
    else:
        qk_scale *= LOG2E
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=mask_m, other=0.0).to(tl.float32) * LOG2E
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    visits = 0

    full_begin = i_begin
    full_end = i_begin
    if TWO_LOOPS:
        # Tiles that every row attends to whole need no mask. A tile with an absent block never counts as one.
        full_lo = key_begin
        full_hi = seq_len
        if CAUSAL:
            full_hi = tl.minimum(full_hi, p_first + 1)
        if WINDOW:
            full_lo = tl.maximum(full_lo, p_last - window + 1)
            if not CAUSAL:
                full_hi = tl.minimum(full_hi, p_first + window)
        x_lo = tl.minimum(tl.maximum((full_lo + TILE - 1) // TILE, tile_lo), tile_hi)
        x_hi = tl.minimum(tl.maximum(full_hi, 0) // TILE, tile_hi)
        full_begin = tl.maximum(n_sink + _rank(ranks_ptr, x_lo, has_holes) - rank_lo, i_begin)
        full_end = tl.minimum(n_sink + _rank(ranks_ptr, tl.maximum(x_hi, x_lo), has_holes) - rank_lo, i_end)
        full_end = tl.where(has_partial, full_begin, full_end)
        full_begin = tl.minimum(full_begin, i_end)
        full_end = tl.maximum(full_end, full_begin)
        for j in tl.range(full_begin * SUB, full_end * SUB):
            tile = rank_lo + j // SUB - n_sink
            tile = tl.load(tiles_ptr + tile, mask=has_holes, other=tile)
            m, total, acc = _tile_step(
                q, m, total, acc, pos, slope, tile * SUB + j % SUB, table_ptr, key_source, value_source,
                stride_kb, stride_kt, stride_vb, stride_vt,
                lo, hi, key_begin, window, num_sink_tokens, qk_scale, softcap,
                False, CAUSAL, WINDOW, SEGMENTS, SOFTCAP, ALIBI, FP8, UPCAST, DESCRIPTORS,
                BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            visits += 1
    skip = full_end - full_begin
    if SEGMENTS:
        # Queries further apart than the window: walk over the union of their windows, not over its hull.
        first_key = tl.minimum(tl.maximum(pos - window + 1, key_begin), seq_len)
        first_tile = tl.maximum(first_key, 0) // TILE
        end_key = pos + 1
        if not CAUSAL:
            end_key = pos + window
        end_key = tl.minimum(end_key, seq_len)
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
            for j in tl.range(segment_begin * SUB, tl.maximum(segment_begin, segment_end) * SUB):
                tile = rank_lo + j // SUB
                tile = tl.load(tiles_ptr + tile, mask=has_holes, other=tile)
                m, total, acc = _tile_step(
                    q, m, total, acc, pos, slope, tile * SUB + j % SUB, table_ptr, key_source, value_source,
                    stride_kb, stride_kt, stride_vb, stride_vt,
                    lo, hi, key_begin, window, num_sink_tokens, qk_scale, softcap,
                    True, CAUSAL, WINDOW, True, SOFTCAP, ALIBI, FP8, UPCAST, DESCRIPTORS,
                    BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
                visits += 1
            segment = tl.min(tl.where(mask_m & (end_tile > 0) & (first_tile > reach), first_tile, 2147483647), 0)
    else:
        for j in tl.range(i_begin * SUB, tl.maximum(i_begin, i_end - skip) * SUB):
            i = j // SUB
            if TWO_LOOPS:
                i = tl.where(i < full_begin, i, i + skip)
            tile = rank_lo + i - n_sink
            if WINDOW:
                tile = tl.where(i < n_sink, rank_sink + i, tile)
            tile = tl.load(tiles_ptr + tile, mask=has_holes, other=tile)
            m, total, acc = _tile_step(
                q, m, total, acc, pos, slope, tile * SUB + j % SUB, table_ptr, key_source, value_source,
                stride_kb, stride_kt, stride_vb, stride_vt,
                lo, hi, key_begin, window, num_sink_tokens, qk_scale, softcap,
                True, CAUSAL, WINDOW, POSITIONS and WINDOW, SOFTCAP, ALIBI, FP8, UPCAST, DESCRIPTORS,
                BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            visits += 1
    if COUNT:
        tl.atomic_add(visits_ptr, visits // SUB)

    if SCALES > 0:
        acc *= tl.cast(tl.load(v_scale_ptr + kv_head * (SCALES - 1)), tl.float32)
    if SPLIT_TILES > 0:
        # One split or many, the same roundings in the same order.
        safe_total = tl.where(total == 0, 1.0, total)
        acc = acc / safe_total[:, None]
        m += tl.log2(safe_total)
        total = tl.where(total == 0, 0.0, 1.0)
    if is_split:
        denominator = tl.where(total == 0, 1.0, total)
        row_out = split_row + tl.cast(token, tl.int64) * NUM_HEADS + head
        tl.store(partial_ptr + row_out[:, None] * HEAD_DIM + offs_d[None, :], acc / denominator[:, None], mask=mask_q)
        tl.store(partial_lse_ptr + row_out, m + tl.log2(denominator), mask=mask_m)
    else:
        _finish(
            acc, m, total, sinks_ptr, out_ptr, lse_ptr, q_token.to(tl.int64), head, mask_m,
            SINKS, WITH_LSE, NUM_HEADS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _zero_padding(
    starts_ptr, out_ptr, lse_ptr, num_seqs, num_tokens, kv_head,
    WITH_LSE: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Rows past the last sequence hold 0 and -inf."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_g = tl.arange(0, BLOCK_G)
    for token in range(tl.load(starts_ptr + num_seqs) + tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64) * NUM_HEADS + kv_head * GROUP + offs_g
        mask = (offs_g[:, None] < GROUP) & (offs_d[None, :] < HEAD_DIM)
        zero = tl.zeros([BLOCK_G, BLOCK_D], out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], zero, mask=mask)
        if WITH_LSE:
            tl.store(lse_ptr + row, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=offs_g < GROUP)


_LENGTHS = ["num_seqs", "num_tokens", "max_tiles", "max_items", "max_q", "num_splits"]
_LENGTHS += ["window", "num_sink_tokens", "key_begin", "num_blocks", "stride_bt"]


@triton.jit(do_not_specialize=_LENGTHS)
def _attention_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_ptr, value_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS // GROUP, HEAD_DIM]
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    lse_ptr,  # [num_tokens, NUM_HEADS]
    partial_ptr, partial_lse_ptr,  # one row of HEAD_DIM per split and row, and its base-2 lse
    tables_ptr,  # [num_seqs, max_blocks]
    seq_lens_ptr, starts_ptr,  # [num_seqs], [num_seqs + 1]
    positions_ptr,  # [num_tokens]
    plan_ptr, alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, visits_ptr,
    num_seqs, num_tokens, max_tiles, max_items, max_q, num_splits,
    scale, softcap, window, num_sink_tokens, key_begin, num_blocks,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_bt,
    DECODE: tl.constexpr, DECODE_Q: tl.constexpr, SPLIT_TILES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, POSITIONS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, SCALES: tl.constexpr, FP8: tl.constexpr, UPCAST: tl.constexpr, COUNT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WITH_LSE: tl.constexpr, TWO_LOOPS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
    SUB: tl.constexpr, SPECIALIZED_M: tl.constexpr,
):  # fmt: skip
    """DECODE: grid (any, KV heads * row tiles), a work list. Else: grid (row tiles, KV heads, splits).

    SPECIALIZED_M above 0: `specialized.py` takes the queries of whole tiles, SPECIALIZED_M at once.
    """
    info_ptr = plan_ptr + HEADER
    items_ptr = info_ptr + tl.cast(num_seqs, tl.int64) * INFO
    tiles_ptr = items_ptr + tl.cast(max_items, tl.int64) * ITEM
    ranks_ptr = tiles_ptr + tl.cast(num_seqs, tl.int64) * max_tiles
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    if DECODE:
        kv_head = tl.program_id(1) % KV_HEADS
        row_begin = tl.program_id(1) // KV_HEADS * BLOCK_M
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
        if (tl.program_id(1) < KV_HEADS) & (tl.program_id(2) == 0):
            _zero_padding(
                starts_ptr, out_ptr, lse_ptr, num_seqs, num_tokens, kv_head,
                WITH_LSE, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_G,
            )  # fmt: skip
    for item in range(item_begin, item_end, item_step):
        if DECODE:
            item_ptr = items_ptr + tl.cast(item, tl.int64) * ITEM
            seq = tl.load(item_ptr)
            i_begin = tl.load(item_ptr + 1)
            i_end = tl.load(item_ptr + 2)
            split_row = tl.cast(item, tl.int64) * max_q * NUM_HEADS
            is_split = tl.load(item_ptr + 3) > 1
        else:
            seq = _find_sequence(starts_ptr, num_seqs, item, 1, GROUP, BLOCK_M)
            i_begin = tl.program_id(2)
            i_end = 0
            is_split = num_splits > 1
        q_begin = tl.load(starts_ptr + seq)
        q_len = tl.load(starts_ptr + seq + 1) - q_begin
        seq_len = tl.load(seq_lens_ptr + seq)
        if DECODE:
            active = row_begin < q_len * GROUP
        else:
            split_row = (tl.cast(tl.program_id(2), tl.int64) * num_tokens + q_begin) * NUM_HEADS
            tile = item - (tl.cast(tl.cast(q_begin, tl.int64) * GROUP // BLOCK_M, tl.int32) + seq)
            row_begin = tile * BLOCK_M
            active = (row_begin < q_len * GROUP) & (q_len > DECODE_Q)
            if SPECIALIZED_M > 0:
                has_partial = (tl.load(info_ptr + tl.cast(seq, tl.int64) * INFO) & 2) != 0
                done = _whole_tile_queries(q_len, seq_len, has_partial, DECODE_Q, SPECIALIZED_M)
                active = active & (row_begin // GROUP >= done)
        if active:
            seq64 = tl.cast(seq, tl.int64)
            flags = tl.load(info_ptr + seq64 * INFO)
            _attend_rows(
                query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
                tables_ptr + seq64 * stride_bt, positions_ptr,
                alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, visits_ptr,
                tiles_ptr + seq64 * max_tiles, ranks_ptr + seq64 * (max_tiles + 1),
                (flags & 1) != 0, (flags & 2) != 0,
                q_begin, q_len, seq_len, row_begin, kv_head, i_begin, i_end, split_row, is_split, num_splits,
                scale, softcap, window, num_sink_tokens, key_begin, num_blocks,
                stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                DECODE, SPLIT_TILES, CAUSAL, WINDOW, POSITIONS, SOFTCAP, ALIBI,
                SINKS, SCALES, FP8, UPCAST, COUNT, DESCRIPTORS, WITH_LSE, TWO_LOOPS, NUM_HEADS, GROUP,
                BLOCK_SIZE, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, SUB,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "max_q", "prefill_splits"])
def _merge_splits_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    lse_ptr,  # [num_tokens, NUM_HEADS]
    decode_ptr, decode_lse_ptr,  # [items, max_q, NUM_HEADS, HEAD_DIM] and its base-2 lse
    prefill_ptr, prefill_lse_ptr,  # [prefill_splits, num_tokens, NUM_HEADS, HEAD_DIM] and its base-2 lse
    starts_ptr, plan_ptr, sinks_ptr,
    num_seqs, num_tokens, max_q, prefill_splits,
    DECODE_Q: tl.constexpr, SINKS: tl.constexpr, WITH_LSE: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (num_tokens, head tiles): sums a row's splits in the order of their keys."""
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask_h = head < NUM_HEADS
    mask = mask_h[:, None] & (offs_d[None, :] < HEAD_DIM)
    seq = _find_sequence(starts_ptr, num_seqs, token, 0, 1, 1)
    q_begin = tl.load(starts_ptr + seq)
    q_len = tl.load(starts_ptr + seq + 1) - q_begin
    num_splits = 0
    if token < q_begin + q_len:
        num_splits = prefill_splits
    first = tl.cast(token, tl.int64) * NUM_HEADS
    step = tl.cast(num_tokens, tl.int64) * NUM_HEADS
    source_ptr = prefill_ptr
    source_lse_ptr = prefill_lse_ptr
    if (q_len <= DECODE_Q) & (num_splits > 0):
        info_ptr = plan_ptr + HEADER + tl.cast(seq, tl.int64) * INFO
        step = tl.cast(max_q, tl.int64) * NUM_HEADS
        first = tl.load(info_ptr + 1) * step + tl.cast(token - q_begin, tl.int64) * NUM_HEADS
        num_splits = tl.load(info_ptr + 2)
        source_ptr = decode_ptr
        source_lse_ptr = decode_lse_ptr
    if num_splits > 1:
        m = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for split in range(num_splits):
            row = first + split * step + head
            part = tl.load(source_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
            part_lse = tl.load(source_lse_ptr + row, mask=mask_h, other=float("-inf"))
            m_new = tl.maximum(m, part_lse)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m - m_safe)
            beta = tl.exp2(part_lse - m_safe)
            acc = acc * alpha[:, None] + part * beta[:, None]
            total = total * alpha + beta
            m = m_new
        _finish(
            acc, m, total, sinks_ptr, out_ptr, lse_ptr, tl.cast(token, tl.int64), head, mask_h,
            SINKS, WITH_LSE, NUM_HEADS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
