"""Attention for queries with their own lists of blocks. There is no plan, because lists differ by layer.

`_list_blocks_kernel` unites the lists of a few neighbouring queries, with a bit for each query that has a block in its
list. `_list_attention_kernel` walks over the union, so a block that several queries chose is read once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._attention.parameters import UNSPECIALIZED
from .._attention.predicate import Mask
from .attention import BUNDLES, _find_sequence, _table_of, _zero_padding
from .bundles import kernel
from .mainloop import PLAIN_CACHE, CachedHead, Queries, TreeRows, _accumulate, _depths, _load_rows, _tree_scores
from .predicate import _ahead, _live_blocks, _row_spans, _within
from .program import _columns_beside, _end_rows, _scaled_queries
from .scores import _slopes


class ListRows(NamedTuple):
    """The rows of a program: one head of one query each, and the index of that query in its tile."""

    member: Any  # [BLOCK_M]
    token: Any  # [BLOCK_M], counted from the sequence's first query
    head: Any  # [BLOCK_M]
    mask_m: Any  # [BLOCK_M], False for rows past the last query
    q_token: Any  # [BLOCK_M]
    pos: Any  # [BLOCK_M]
    q_ptrs: Any  # [BLOCK_M, 1]
    tree_ptr: Any


@triton.jit
def _list_sequence(starts_ptr, seq_lens_ptr, num_seqs, item, QUERIES: tl.constexpr):
    """Return a query tile's sequence, its first token, its numbers of queries and keys, and the tile's first query."""
    seq = _find_sequence(starts_ptr, num_seqs, item, 1, 1, QUERIES)
    q_begin = tl.load(starts_ptr + seq)
    q_len = tl.load(starts_ptr + seq + 1) - q_begin
    seq_len = tl.load(seq_lens_ptr + seq)
    return seq, q_begin, q_len, seq_len, (item - (q_begin // QUERIES + seq)) * QUERIES


@kernel(UNSPECIALIZED, mask=Mask)
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
    """Write the blocks that a tile's queries chose and that are present and attended. Grid (query tiles, KV heads)."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    seq, q_begin, q_len, seq_len, first = _list_sequence(starts_ptr, seq_lens_ptr, num_seqs, item, QUERIES)
    place = tl.cast(item, tl.int64) * KV_HEADS + head
    marks_ptr += place * stride_marks
    union_ptr += place * max_union * 2
    table_ptr = _table_of(tables_ptr, seq, head, stride_bt, stride_bh, TABLE_HEADS)
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
                # The tree mask decides about the call's own tokens, not the depth.
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
def _list_share(count_ptr, split, num_splits):
    """Return the entries of a union that a split walks over."""
    count = tl.load(count_ptr)
    per = (count + num_splits - 1) // num_splits
    begin = tl.minimum(split * per, count)
    return begin, tl.minimum(begin + per, count)


@triton.jit
def _list_keys(
    union_ptr, table_ptr, i, i_end, piece, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr
):
    """Return block number, position and query bits of each key of a step.

    A step has WIDTH keys of each of its blocks, from key piece * WIDTH on.
    """
    offs_n = tl.arange(0, BLOCK_N)
    i += offs_n // WIDTH
    offset = offs_n % WIDTH + piece * WIDTH
    exists = (i < i_end) & (offset < BLOCK_SIZE)
    block = tl.load(union_ptr + 2 * i, mask=exists, other=0)
    bits = tl.load(union_ptr + 2 * i + 1, mask=exists, other=0)
    number = tl.load(table_ptr + block, mask=exists, other=0)
    return number, tl.where(exists, block * BLOCK_SIZE + offset, 2147483647), bits


@triton.jit
def _list_rows(
    tensors, strides, kv_head, row_begin, first, q_begin, q_len, seq_len, traits, tile, QUERIES: tl.constexpr
):
    """Return rows row_begin to row_begin + BLOCK_M of a sequence's QUERIES queries from `first` on."""
    row = row_begin + tl.arange(0, tile.BLOCK_M)
    member = row // traits.GROUP
    token = first + member
    head = kv_head * traits.GROUP + row % traits.GROUP
    mask_m = (member < QUERIES) & (token < q_len)
    q_token = (q_begin + token).to(tl.int64)
    pos = seq_len - q_len + token
    if traits.POSITIONS:
        pos = tl.load(tensors.positions_ptr + q_token, mask=mask_m, other=0)
    q_ptrs = tensors.query_ptr + q_token[:, None] * strides.stride_qt + head.to(tl.int64)[:, None] * strides.stride_qh
    tree_ptr = tensors.tree_ptr
    if traits.TREE:
        tree_ptr = tensors.tree_ptr + tl.where(mask_m, q_token, 0) * strides.stride_tree
    return ListRows(member, token, head, mask_m, q_token, pos, q_ptrs, tree_ptr)


@triton.jit
def _load_list_query(rows, first, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load WIDTH columns of the rows' queries from column `first` on."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = rows.mask_m[:, None] & (offs_d[None, :] < WIDTH)
    return tl.load(rows.q_ptrs + first + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def _load_list_queries(rows, key_at, other_at, rest_at, traits, tile):
    """Load the rows' queries: the columns of the program's own part, of the other part, and of the rotated key.

    Only latent rows have another part or rope columns. Otherwise q is returned in their places and never read there.
    """
    q = _load_list_query(rows, key_at, traits.HEAD_DIM, tile.BLOCK_D)
    other = q
    rest = q
    if tile.VALUE_SPLITS > 1:
        other = _load_list_query(rows, key_at + other_at, traits.HEAD_DIM, tile.BLOCK_D)
    if traits.ROPE_COLUMNS > 0:
        rest = _load_list_query(rows, key_at + rest_at, traits.ROPE_COLUMNS, tile.BLOCK_R)
    return q, other, rest


@triton.jit
def _list_step(
    m, total, acc, number, t, bits, seq_len, queries, rows, tree, cache, terms, mask, traits, BLOCK_N: tl.constexpr
):
    """Run a step of the online softmax over keys at positions t.

    `bits` has a bit for each query that chose the block.
    """
    offs_d = tl.arange(0, cache.BLOCK_D)
    live = ((bits[None, :] >> rows.member[:, None]) & 1 != 0) & rows.mask_m[:, None]
    row_lo, row_hi = _row_spans(rows.pos, seq_len, 0, mask)
    attended = _within(_ahead(t, 0)[None, :], row_lo[:, None], row_hi[:, None], 0, mask)
    if traits.TREE:
        attended = _tree_scores(attended, t, seq_len, tree)
    live = live & attended
    present = tl.max(tl.broadcast_to(live, [queries.q.shape[0], BLOCK_N]).to(tl.int32), 0) > 0
    number64 = number.to(tl.int64)
    slot = (t % cache.BLOCK_SIZE).to(tl.int64)
    row_ptrs = cache.key_ptr + (number64 * cache.stride_kb + slot * cache.stride_kt)[:, None]
    keys = row_ptrs + offs_d[None, :]
    k = _load_rows(keys, present, queries.q.dtype, True, cache.CODES, cache.HEAD_DIM, BLOCK_N, cache.BLOCK_D)
    other = k
    rest = k
    if cache.VALUE_SPLITS > 1:
        pointers = keys + cache.other
        other = _load_rows(
            pointers, present, queries.q.dtype, True, cache.CODES, cache.HEAD_DIM, BLOCK_N, cache.BLOCK_D
        )
    if cache.ROPE_COLUMNS > 0:
        behind = row_ptrs + cache.behind + tl.arange(0, cache.BLOCK_R)[None, :]
        rest = _load_rows(
            behind, present, queries.q.dtype, True, cache.CODES, cache.ROPE_COLUMNS, BLOCK_N, cache.BLOCK_R
        )
        v = k
    else:
        offs_v = tl.arange(0, cache.BLOCK_V)
        values = cache.value_ptr + (number64 * cache.stride_vb + slot * cache.stride_vt)[:, None] + offs_v[None, :]
        v = _load_rows(values, present, queries.q.dtype, True, cache.CODES, cache.VALUE_DIM, BLOCK_N, cache.BLOCK_V)
    if traits.TREE and terms.ALIBI and traits.POSITIONS:
        t = _depths(t, seq_len, tree)
    return _accumulate(m, total, acc, k, other, rest, v, t, live, queries, terms, True)


@kernel(UNSPECIALIZED, **BUNDLES)
def _list_attention_kernel(
    tensors, union_ptr, counts_ptr, num_seqs, num_tokens, max_union, num_splits,
    scale, terms, mask, strides, traits, tile,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute attention over united lists. Grid (query tiles, KV heads * row tiles * parts, splits)."""
    BLOCK_SIZE: tl.constexpr = traits.BLOCK_SIZE
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    KV_HEADS: tl.constexpr = traits.NUM_HEADS // traits.GROUP
    PARTS: tl.constexpr = BLOCK_N // WIDTH
    PIECES: tl.constexpr = (BLOCK_SIZE + WIDTH - 1) // WIDTH
    item = tl.program_id(0)
    part = tl.program_id(1) % tile.VALUE_SPLITS
    kv_head = tl.program_id(1) // tile.VALUE_SPLITS % KV_HEADS
    row_begin = tl.program_id(1) // tile.VALUE_SPLITS // KV_HEADS * tile.BLOCK_M
    split = tl.program_id(2)
    if (row_begin == 0) & (part == 0) & (split == 0):
        _zero_padding(tensors, num_seqs, num_tokens, kv_head, traits, tile)
    starts_ptr = tensors.starts_ptr
    seq, q_begin, q_len, seq_len, first = _list_sequence(starts_ptr, tensors.seq_lens_ptr, num_seqs, item, QUERIES)
    if first >= q_len:
        return
    place = tl.cast(item, tl.int64) * KV_HEADS + kv_head
    union_ptr += place * max_union * 2
    table_ptr = _table_of(tensors.tables_ptr, seq, kv_head, strides.stride_bt, strides.stride_bh, traits.TABLE_HEADS)
    i_begin, i_end = _list_share(counts_ptr + place, split, num_splits)

    rows = _list_rows(tensors, strides, kv_head, row_begin, first, q_begin, q_len, seq_len, traits, tile, QUERIES)
    ROWS: tl.constexpr = traits.CODES != PLAIN_CACHE and tensors.query_ptr.dtype.element_ty == tl.bfloat16
    SHIFT: tl.constexpr = 15 if ROWS or tensors.query_ptr.dtype.element_ty == tl.float16 else 0
    other_at, rest_at = _columns_beside(part, traits, tile)
    key_at = part * tile.BLOCK_D
    q, other, rest = _load_list_queries(rows, key_at, other_at, rest_at, traits, tile)
    q, other, rest, factor = _scaled_queries(
        q, other, rest, scale, tensors.k_scale_ptr, kv_head, terms, traits, tile, ROWS
    )  # fmt: skip
    slope = _slopes(tensors.alibi_ptr, rows.head, rows.mask_m, terms)
    key_ptr = tensors.key_ptr + tl.cast(kv_head, tl.int64) * strides.stride_kh + key_at
    value_ptr = tensors.value_ptr + tl.cast(kv_head, tl.int64) * strides.stride_vh
    m = tl.full([tile.BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([tile.BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([tile.BLOCK_M, tile.BLOCK_V], tl.float32)
    number, t, bits = _list_keys(union_ptr, table_ptr, i_begin, i_end, 0, BLOCK_SIZE, BLOCK_N, WIDTH)
    for step in tl.range(0, (i_end - i_begin + PARTS - 1) // PARTS * PIECES):
        # Load the next step's block numbers while this step's keys are loaded.
        following = step + 1
        next_number, next_t, next_bits = _list_keys(
            union_ptr, table_ptr, i_begin + following // PIECES * PARTS, i_end, following % PIECES,
            BLOCK_SIZE, BLOCK_N, WIDTH,
        )  # fmt: skip
        # Build the tuple where it is passed on. As a variable of the loop it would lose its constants.
        m, total, acc = _list_step(
            m, total, acc, number, t, bits, seq_len,
            Queries(q, other, rest, rows.pos, slope, factor, traits.UPCAST, ROWS, True, SHIFT,
                    tile.VALUE_SPLITS, traits.ROPE_COLUMNS),
            rows,
            TreeRows(rows.tree_ptr, seq_len - q_len, strides.tree_keys, tensors.positions_ptr + q_begin),
            CachedHead(
                key_ptr, value_ptr, strides.stride_kb, strides.stride_kt, strides.stride_vb, strides.stride_vt,
                other_at, rest_at, traits.CODES, BLOCK_SIZE, traits.HEAD_DIM, traits.VALUE_DIM, traits.ROPE_COLUMNS,
                tile.BLOCK_D, tile.BLOCK_V, tile.BLOCK_R, tile.VALUE_SPLITS,
            ),
            terms, mask, traits, BLOCK_N,
        )  # fmt: skip
        number, t, bits = next_number, next_t, next_bits
    total = tl.sum(total, 1)
    split_row = (tl.cast(split, tl.int64) * num_tokens + q_begin) * traits.NUM_HEADS
    _end_rows(
        acc, m, total, tensors, kv_head, rows.token, rows.q_token, rows.head, rows.mask_m, num_splits > 1, split_row,
        part * tile.BLOCK_V, traits, False, traits.NUM_HEADS, tile.BLOCK_V,
    )  # fmt: skip
