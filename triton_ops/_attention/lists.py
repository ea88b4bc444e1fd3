"""Attention of queries that have lists of blocks of their own: no plan, since the lists are of one layer.

`_list_blocks_kernel` unites the lists of a few neighbouring queries, with a bit for each query that has the block in
its list; `_list_attention_kernel` walks over the union, so that a block that several of them chose is read once.
"""

from __future__ import annotations

from .._kernel import kernel
from .._triton import tl, triton
from .kernel import _find_sequence, _zero_padding
from .keys import PLAIN_CACHE, _load_rows
from .layout import LENGTHS
from .predicate import Mask, _ahead, _live_blocks, _row_spans, _within
from .scaling import _end_rows, _scaled_queries
from .scores import Terms, _slopes
from .walk import _accumulate, _depths, _tree_scores


@kernel(LENGTHS, mask=Mask)
def _list_blocks_kernel(
    lists_ptr,  # [num_tokens, KV_HEADS, top_k]
    marks_ptr,  # [query tiles, KV_HEADS, stride_marks]: which queries of a tile have the block
    union_ptr,  # [query tiles, KV_HEADS, max_union, 2]: a block, and which queries have it
    counts_ptr,  # [query tiles, KV_HEADS]
    tables_ptr, seq_lens_ptr, starts_ptr, positions_ptr,
    num_seqs, top_k, max_blocks, max_union, stride_marks, mask,
    stride_lq, stride_lh, stride_bt, stride_bh,
    POSITIONS: tl.constexpr, TABLE_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_K: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, KV heads): the blocks that queries of a tile chose, are present and within reach."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    seq = _find_sequence(starts_ptr, num_seqs, item, 1, 1, QUERIES)
    q_begin = tl.load(starts_ptr + seq)
    q_len = tl.load(starts_ptr + seq + 1) - q_begin
    seq_len = tl.load(seq_lens_ptr + seq)
    first = (item - (q_begin // QUERIES + seq)) * QUERIES
    place = tl.cast(item, tl.int64) * KV_HEADS + head
    marks_ptr += place * stride_marks
    union_ptr += place * max_union * 2
    table_ptr = tables_ptr + tl.cast(seq, tl.int64) * stride_bt
    if TABLE_HEADS > 1:
        table_ptr += tl.cast(head, tl.int64) * stride_bh
    blocks = tl.minimum((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE, max_blocks)
    blocks = tl.where(first < q_len, blocks, 0)
    offs_k = tl.arange(0, BLOCK_K)
    for base in range(0, blocks, BLOCK_K):
        tl.store(marks_ptr + base + offs_k, tl.zeros([BLOCK_K], tl.uint8), mask=base + offs_k < blocks)
    tl.debug_barrier()
    for query in range(0, tl.minimum(q_len - first, QUERIES)):
        token = q_begin + first + query
        pos = seq_len - q_len + first + query
        if POSITIONS:
            pos = tl.load(positions_ptr + token)
        list_ptr = lists_ptr + tl.cast(token, tl.int64) * stride_lq + tl.cast(head, tl.int64) * stride_lh
        for base in range(0, top_k, BLOCK_K):
            block = tl.load(list_ptr + base + offs_k, mask=base + offs_k < top_k, other=-1)
            exists = (block >= 0) & (block < blocks)
            live = _live_blocks(exists, block * BLOCK_SIZE, pos, mask, BLOCK_SIZE)
            if TREE:
                # Of the call's own tokens the mask decides, not the depth.
                live = exists & (live | ((block + 1) * BLOCK_SIZE > seq_len - q_len))
            live = live & (tl.load(table_ptr + block, mask=live, other=-1) >= 0)
            mark = tl.load(marks_ptr + block, mask=live, other=0).to(tl.int32) | (1 << query)
            tl.store(marks_ptr + block, mark.to(tl.uint8), mask=live)
        # Another thread may mark the same block for the next query.
        tl.debug_barrier()
    count = 0
    for base in range(0, blocks, BLOCK_K):
        offs = base + offs_k
        mark = tl.load(marks_ptr + offs, mask=offs < blocks, other=0).to(tl.int32)
        live = (mark != 0).to(tl.int32)
        rank = count + tl.cumsum(live, 0) - live
        tl.store(union_ptr + 2 * rank, offs, mask=live > 0)
        tl.store(union_ptr + 2 * rank + 1, mark, mask=live > 0)
        count += tl.sum(live, 0)
    tl.store(counts_ptr + place, count)


@triton.jit
def _list_keys(
    union_ptr, table_ptr, i, i_end, piece, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr
):
    """Block number, position and chosen-by bits of each of a step's keys; blocks begin every WIDTH keys."""
    offs_n = tl.arange(0, BLOCK_N)
    i += offs_n // WIDTH
    offset = offs_n % WIDTH + piece * WIDTH
    exists = (i < i_end) & (offset < BLOCK_SIZE)
    block = tl.load(union_ptr + 2 * i, mask=exists, other=0)
    bits = tl.load(union_ptr + 2 * i + 1, mask=exists, other=0)
    number = tl.load(table_ptr + block, mask=exists, other=0)
    return number, tl.where(exists, block * BLOCK_SIZE + offset, 2147483647), bits


@kernel(LENGTHS, mask=Mask, terms=Terms)
def _list_attention_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr,
    partial_ptr, partial_lse_ptr,  # [splits, num_tokens, NUM_HEADS, VALUE_DIM] and its base-2 lse
    union_ptr, counts_ptr, tables_ptr, seq_lens_ptr, starts_ptr, positions_ptr,
    alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, visits_ptr,
    tree_ptr,  # [num_tokens, tree_keys // 32]
    num_seqs, num_tokens, max_union, num_splits, scale, terms, mask,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_bt, stride_bh,
    tree_keys, stride_tree,
    POSITIONS: tl.constexpr, SINKS: tl.constexpr, SCALES: tl.constexpr, CODES: tl.constexpr, UPCAST: tl.constexpr,
    COUNT: tl.constexpr, TREE: tl.constexpr,
    TABLE_HEADS: tl.constexpr, WITH_LSE: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_G: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, KV heads * row tiles, splits)."""
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    PARTS: tl.constexpr = BLOCK_N // WIDTH
    PIECES: tl.constexpr = (BLOCK_SIZE + WIDTH - 1) // WIDTH
    item = tl.program_id(0)
    kv_head = tl.program_id(1) % KV_HEADS
    row_begin = tl.program_id(1) // KV_HEADS * BLOCK_M
    split = tl.program_id(2)
    if (row_begin == 0) & (split == 0):
        _zero_padding(
            starts_ptr, out_ptr, lse_ptr, num_seqs, num_tokens, kv_head,
            WITH_LSE, NUM_HEADS, GROUP, VALUE_DIM, BLOCK_V, BLOCK_G,
        )  # fmt: skip
    seq = _find_sequence(starts_ptr, num_seqs, item, 1, 1, QUERIES)
    q_begin = tl.load(starts_ptr + seq)
    q_len = tl.load(starts_ptr + seq + 1) - q_begin
    seq_len = tl.load(seq_lens_ptr + seq)
    first = (item - (q_begin // QUERIES + seq)) * QUERIES
    if first >= q_len:
        return
    place = tl.cast(item, tl.int64) * KV_HEADS + kv_head
    union_ptr += place * max_union * 2
    table_ptr = tables_ptr + tl.cast(seq, tl.int64) * stride_bt
    if TABLE_HEADS > 1:
        table_ptr += tl.cast(kv_head, tl.int64) * stride_bh
    count = tl.load(counts_ptr + place)
    per = (count + num_splits - 1) // num_splits
    i_begin = tl.minimum(split * per, count)
    i_end = tl.minimum(i_begin + per, count)

    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_V)
    row = row_begin + tl.arange(0, BLOCK_M)
    member = row // GROUP
    token = first + member
    head = kv_head * GROUP + row % GROUP
    mask_m = (member < QUERIES) & (token < q_len)
    q_token = (q_begin + token).to(tl.int64)
    pos = seq_len - q_len + token
    if POSITIONS:
        pos = tl.load(positions_ptr + q_token, mask=mask_m, other=0)
    q = tl.load(
        query_ptr + q_token[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0,
    )  # fmt: skip
    ROWS: tl.constexpr = CODES != PLAIN_CACHE and query_ptr.dtype.element_ty == tl.bfloat16
    SHIFT: tl.constexpr = 15 if ROWS or query_ptr.dtype.element_ty == tl.float16 else 0
    q, factor = _scaled_queries(q, scale, k_scale_ptr, kv_head, terms, SCALES, CODES, ROWS)
    slope = _slopes(alibi_ptr, head, mask_m, terms)
    key_ptr += tl.cast(kv_head, tl.int64) * stride_kh
    value_ptr += tl.cast(kv_head, tl.int64) * stride_vh
    own_begin = seq_len - q_len
    tree_rows = tree_ptr
    if TREE:
        tree_rows = tree_ptr + tl.where(mask_m, q_token, 0) * stride_tree
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    number, t, bits = _list_keys(union_ptr, table_ptr, i_begin, i_end, 0, BLOCK_SIZE, BLOCK_N, WIDTH)
    for step in tl.range(0, (i_end - i_begin + PARTS - 1) // PARTS * PIECES):
        # Numbers of the next step's blocks are on their way while this one's keys are.
        following = step + 1
        next_number, next_t, next_bits = _list_keys(
            union_ptr, table_ptr, i_begin + following // PIECES * PARTS, i_end, following % PIECES,
            BLOCK_SIZE, BLOCK_N, WIDTH,
        )  # fmt: skip
        live = ((bits[None, :] >> member[:, None]) & 1 != 0) & mask_m[:, None]
        row_lo, row_hi = _row_spans(pos, seq_len, 0, mask)
        reached = _within(_ahead(t, 0)[None, :], row_lo[:, None], row_hi[:, None], 0, mask)
        if TREE:
            reached = _tree_scores(reached, t, seq_len, tree_rows, own_begin, tree_keys)
        live = live & reached
        present = tl.max(tl.broadcast_to(live, [BLOCK_M, BLOCK_N]).to(tl.int32), 0) > 0
        number64 = number.to(tl.int64)
        slot = (t % BLOCK_SIZE).to(tl.int64)
        keys = key_ptr + (number64 * stride_kb + slot * stride_kt)[:, None] + offs_d[None, :]
        values = value_ptr + (number64 * stride_vb + slot * stride_vt)[:, None] + offs_v[None, :]
        k = _load_rows(keys, present, q.dtype, True, CODES, HEAD_DIM, BLOCK_N, BLOCK_D)
        v = _load_rows(values, present, q.dtype, True, CODES, VALUE_DIM, BLOCK_N, BLOCK_V)
        if TREE and terms.ALIBI and POSITIONS:
            t = _depths(positions_ptr + q_begin, t, seq_len, own_begin)
        m, total, acc = _accumulate(
            q, m, total, acc, pos, slope, k, v, t, live, factor, terms, True, UPCAST, ROWS, True, SHIFT
        )
        number = next_number
        t = next_t
        bits = next_bits
    total = tl.sum(total, 1)
    if COUNT:
        tl.atomic_add(visits_ptr, i_end - i_begin)
    split_row = (tl.cast(split, tl.int64) * num_tokens + q_begin) * NUM_HEADS
    _end_rows(
        acc, m, total, v_scale_ptr, kv_head, sinks_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
        q_token, head, mask_m, num_splits > 1, split_row, token,
        False, SINKS, SCALES, CODES, WITH_LSE, NUM_HEADS, NUM_HEADS, VALUE_DIM, BLOCK_V,
    )  # fmt: skip
