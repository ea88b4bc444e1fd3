"""Prefill for Hopper with specialized warps: some fetch keys and values while others multiply.

The same predicate and the same live tiles as `kernel.py`, for the queries whose keys all lie in whole tiles: the tensor
memory accelerator cannot leave out the rows of a block past the end of a sequence, and what they hold may be NaN. The
last queries of a sequence, fewer than BLOCK_M + TILE, are left to the general kernel. One query head a program, since
triton 3.6 has no way to fetch a group's rows at once; one loop, since it specializes no more.
"""

from __future__ import annotations

from .._kernel import kernel
from .._triton import tl
from .kernel import _find_sequence
from .keys import _rows_of_head
from .layout import DEAD_TILES, INFO_FLAGS, LENGTHS, PARTIAL_TILES, _plan_rows
from .predicate import Mask, _ahead, _row_spans, _span, _whole_tile_queries, _within
from .rows import _rank
from .softmax import LOG2E, _finish, _rescale


@kernel(LENGTHS, mask=Mask)
def _specialized_attention_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_ptr, value_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS // GROUP, HEAD_DIM]
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    lse_ptr,  # [num_tokens, NUM_HEADS]
    tables_ptr,  # [num_seqs, max_blocks]
    seq_lens_ptr, starts_ptr,  # [num_seqs], [num_seqs + 1]
    plan_ptr, sinks_ptr,
    num_seqs, num_tokens, max_tiles, max_items,
    scale, mask, key_begin, num_blocks,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_bt,
    DECODE_Q: tl.constexpr, SINKS: tl.constexpr, WITH_LSE: tl.constexpr, UPCAST: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, heads); causal, scale above 0. BLOCK_N is TILE."""
    head = tl.program_id(1)
    kv_head = tl.cast(head // GROUP, tl.int64)
    # The last tiles of a causal prefill are the longest: they start first.
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = _find_sequence(starts_ptr, num_seqs, item, 1, 1, BLOCK_M)
    info_ptr, tiles_ptr, ranks_ptr = _plan_rows(plan_ptr, seq, num_seqs, max_tiles, max_items)
    table_ptr = tables_ptr + tl.cast(seq, tl.int64) * stride_bt
    flags = tl.load(info_ptr + INFO_FLAGS)
    has_holes = (flags & DEAD_TILES) != 0
    q_begin = tl.load(starts_ptr + seq)
    q_len = tl.load(starts_ptr + seq + 1) - q_begin
    seq_len = tl.load(seq_lens_ptr + seq)
    first = (item - (q_begin // BLOCK_M + seq)) * BLOCK_M
    active = first < _whole_tile_queries(q_len, seq_len, (flags & PARTIAL_TILES) != 0, DECODE_Q, BLOCK_M)
    first = tl.where(active, first, 0)

    p_first = seq_len - q_len + first
    p_last = p_first + BLOCK_M - 1
    _, _, tile_lo, tile_hi, sink_lo, sink_hi = _span(p_first, p_last, seq_len, key_begin, mask)
    # An early return would end the specialization, so a program without work walks over no tile instead.
    tile_hi = tl.where(active, tile_hi, tile_lo)
    sink_hi = tl.where(active, sink_hi, sink_lo)
    rank_lo = _rank(ranks_ptr, tile_lo, has_holes)
    n = _rank(ranks_ptr, tile_hi, has_holes) - rank_lo
    n_sink = 0
    rank_sink = 0
    if mask.BOUNDED:
        rank_sink = _rank(ranks_ptr, sink_lo, has_holes)
        n_sink = _rank(ranks_ptr, sink_hi, has_holes) - rank_sink
        n += n_sink

    queries = tl.make_tensor_descriptor(
        query_ptr + head * stride_qh, shape=[num_tokens, HEAD_DIM], strides=[stride_qt, 1],
        block_shape=[BLOCK_M, HEAD_DIM],
    )  # fmt: skip
    keys, key_rows = _rows_of_head(
        key_ptr + kv_head * stride_kh, num_blocks, stride_kb, stride_kt, BLOCK_SIZE, HEAD_DIM, BLOCK_N, HEAD_DIM
    )
    values, value_rows = _rows_of_head(
        value_ptr + kv_head * stride_vh, num_blocks, stride_vb, stride_vt, BLOCK_SIZE, HEAD_DIM, BLOCK_N, HEAD_DIM
    )
    q = queries.load([q_begin + first, 0])
    token = first + tl.arange(0, BLOCK_M)
    pos = seq_len - q_len + token
    row_lo, row_hi = _row_spans(pos, seq_len, key_begin, mask)
    offs_n = tl.arange(0, BLOCK_N)
    factor = scale * LOG2E
    SHIFT: tl.constexpr = 15 if query_ptr.dtype.element_ty == tl.float16 else 0
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for i in tl.range(0, n, warp_specialize=True, num_stages=STAGES):
        tile = rank_lo + i - n_sink
        if mask.BOUNDED:
            tile = tl.where(i < n_sink, rank_sink + i, tile)
        tile = tl.load(tiles_ptr + tile, mask=has_holes, other=tile)
        t = tile * BLOCK_N + offs_n
        block = tl.load(table_ptr + tile * BLOCK_N // BLOCK_SIZE)
        k = keys.load([block * key_rows + tile * BLOCK_N % BLOCK_SIZE, 0])
        if UPCAST:
            score = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
        else:
            score = tl.dot(q, tl.trans(k))
        live = _within(_ahead(t, key_begin)[None, :], row_lo[:, None], row_hi[:, None], key_begin, mask)
        score = tl.where(live, score, float("-inf"))
        p, m, total, acc = _rescale(score, m, total, acc, factor, True, False, False, SHIFT)
        v = values.load([block * value_rows + tile * BLOCK_N % BLOCK_SIZE, 0])
        if UPCAST:
            acc += tl.dot(p.to(q.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc)
    mask_m = token < tl.where(active, q_len, 0)
    heads = tl.zeros([BLOCK_M], tl.int32) + head
    _finish(
        acc, m, total, sinks_ptr, out_ptr, lse_ptr, (q_begin + token).to(tl.int64), heads, mask_m, 0,
        SINKS, WITH_LSE, NUM_HEADS, HEAD_DIM, HEAD_DIM,
    )  # fmt: skip
