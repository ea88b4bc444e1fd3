"""The loop over live tiles of keys: the addresses of a step's keys, found in advance, and the online softmax.

A tile is live if one of its blocks is present. Its rank is the number of live tiles before it.

The numbers of a step's blocks are loaded one step before its keys. So loads of keys and values wait for nothing, and as
many of them are in flight as there are stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._attention import parameters
from .._attention.predicate import Mask
from .._attention.scores import ScoreModifiers
from .codes import packed_codes, small_e4m3
from .layout import TILE, kernel_constants
from .predicate import _ahead, _row_spans, _within
from .scores import _rescale, _with_terms

PLAIN_CACHE, NATIVE_CODES, PACKED_CODES, LOCAL_CODES, E4M3_BITS, E4M3_PACKED = kernel_constants(
    parameters.PLAIN_CACHE, parameters.NATIVE_CODES, parameters.PACKED_CODES,
    parameters.LOCAL_CODES, parameters.E4M3_BITS, parameters.E4M3_PACKED,
)  # fmt: skip
# Distance of an absent key: beyond every end.
(ABSENT,) = kernel_constants(1 << 31)


class Queries(NamedTuple):
    """The rows of a program, in a tile's order, with the numbers that their scores need.

    Queries of latent rows have up to three parts. `q` is for the program's columns of the value. `other` is for the
    value's other columns (VALUE_SPLITS above 1). `rest` is for the rotated columns (ROPE_COLUMNS above 0). UPCAST:
    compute products in float32. ROWS: `factor` has one number for each row. LAZY and SHIFT: as for `_rescale`.
    """

    q: Any  # [BLOCK_M, BLOCK_D]
    other: Any  # [BLOCK_M, BLOCK_D]
    rest: Any  # [BLOCK_M, BLOCK_R]
    pos: Any  # [BLOCK_M]
    slope: Any  # [BLOCK_M]
    factor: Any
    UPCAST: bool
    ROWS: bool
    LAZY: bool
    SHIFT: int
    VALUE_SPLITS: int
    ROPE_COLUMNS: int


class CachedHead(NamedTuple):
    """Keys and values of a KV head in the cache.

    ROPE_COLUMNS above 0: rows are latent, and `key_ptr` points at the program's columns of the value, which also belong
    to the key. `other` is the distance in columns from there to the value's other columns, `behind` to the rotated
    columns.
    """

    key_ptr: Any
    value_ptr: Any
    stride_kb: Any
    stride_kt: Any
    stride_vb: Any
    stride_vt: Any
    other: Any
    behind: Any
    CODES: int
    BLOCK_SIZE: int
    HEAD_DIM: int
    VALUE_DIM: int
    ROPE_COLUMNS: int
    BLOCK_D: int
    BLOCK_V: int
    BLOCK_R: int
    VALUE_SPLITS: int


class LiveTiles(NamedTuple):
    """The live tiles to which a program's rows attend, numbered 0, 1, 2, ...

    The first n_sink have sink tokens and begin at rank rank_sink. The others begin at rank rank_lo. Without has_holes
    every tile of the sequence is live, so the rank of a tile is its number.
    """

    table_ptr: Any
    tiles_ptr: Any
    has_holes: Any
    rank_lo: Any
    n_sink: Any
    rank_sink: Any


class TreeRows(NamedTuple):
    """The rows' masks over the call's own tokens, for attention over a tree.

    `rows` has a pointer to each row's mask, and `keys` is the number of tokens in a mask. `own_begin` is the position
    of the first own token. `positions_ptr` points at the depths of the own tokens.
    """

    rows: Any
    own_begin: Any
    keys: Any
    positions_ptr: Any


class Walk(NamedTuple):
    """The values that are the same in every step of a program.

    Its rows attend to keys in [lo, hi) and to sink tokens.
    """

    queries: Queries
    cache: CachedHead
    tiles: LiveTiles
    tree: TreeRows
    mask: Mask
    terms: ScoreModifiers
    lo: Any
    hi: Any
    key_begin: Any
    # Triton 3.6 keeps the constants of nested tuples only if a constant comes last.
    TREE: bool


@triton.jit
def _tile_start(i, i_end, jump, skip, hi, tiles, SINKS: tl.constexpr):
    """Return the first key of the i-th live tile, or `hi`, the end of all keys, if i is not below i_end.

    i counts without the `skip` tiles that begin at tile `jump`.
    """
    exists = i < i_end
    i = tl.where(i < jump, i, i + skip)
    rank = tiles.rank_lo + i - tiles.n_sink
    if SINKS:
        rank = tl.where(i < tiles.n_sink, tiles.rank_sink + i, rank)
    tile = tl.load(tiles.tiles_ptr + rank, mask=tiles.has_holes & exists, other=rank)
    return tl.where(exists, tile * TILE, hi)


@triton.jit
def _step_start(step, i_begin, i_end, jump, skip, hi, tiles, SINKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first key of a step, and of its second tile if it has one."""
    i = i_begin + step * BLOCK_N // TILE
    start = _tile_start(i, i_end, jump, skip, hi, tiles, SINKS)
    second = start
    if BLOCK_N < TILE:
        start += step * BLOCK_N % TILE
    if BLOCK_N > TILE:
        second = _tile_start(i + 1, i_end, jump, skip, hi, tiles, SINKS)
    return start, second


@triton.jit
def _key_positions(start, second, BLOCK_N: tl.constexpr):
    """Return the positions of a step's keys: from `start` on, and beyond TILE keys from `second` on."""
    offs_n = tl.arange(0, BLOCK_N)
    t = start + offs_n
    if BLOCK_N > TILE:
        t = tl.where(offs_n < TILE, t, second + offs_n - TILE)
    return t


@triton.jit
def _block_numbers(table_ptr, start, second, hi, FULL: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the block number of each key of a step, or one number for all; -1 for an absent block.

    If parts that lie in one block are few, there is one load for each; otherwise one for each key. FULL: a step that
    starts below hi does not end after hi.
    """
    SPAN: tl.constexpr = BLOCK_N if BLOCK_N < TILE else TILE
    # Number of keys in one block wherever a step starts: the power of two in BLOCK_SIZE.
    POWER: tl.constexpr = BLOCK_SIZE & -BLOCK_SIZE
    PART: tl.constexpr = POWER if POWER < SPAN else SPAN
    if BLOCK_N <= TILE and BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < hi, other=-1)
    elif BLOCK_N // PART <= 8:
        part = tl.arange(0, BLOCK_N) // PART
        block = tl.zeros([BLOCK_N], tl.int32)
        entry_ptr = table_ptr + tl.cast(start, tl.uint32) // BLOCK_SIZE
        for i in tl.static_range(BLOCK_N // PART):
            key = start
            offset = i * PART
            if i * PART >= TILE:
                key = second
                offset = i * PART - TILE
                if i * PART == TILE:
                    entry_ptr = table_ptr + tl.cast(second, tl.uint32) // BLOCK_SIZE
            if SPAN % BLOCK_SIZE == 0 or BLOCK_SIZE % SPAN == 0:
                part_ptr = entry_ptr + offset // BLOCK_SIZE
            else:
                part_ptr = table_ptr + tl.cast(key + offset, tl.uint32) // BLOCK_SIZE
            live = key < hi if FULL else key + offset < hi
            block = tl.where(part >= i, tl.load(part_ptr, mask=live, other=-1), block)
        return block
    else:
        t = _key_positions(start, second, BLOCK_N)
        return tl.load(table_ptr + t // BLOCK_SIZE, mask=t < hi, other=-1)


@triton.jit
def _tree_scores(live, t, hi, tree):
    """Return `live`, replaced by the bits of the rows' masks for the call's own tokens."""
    own = t - tree.own_begin
    is_own = (own >= 0) & (t < hi)
    word = tl.load(tree.rows[:, None] + (own // 32)[None, :], mask=(is_own & (own < tree.keys))[None, :], other=0)
    return tl.where(is_own[None, :], (word >> (own & 31)[None, :]) & 1 != 0, live)


@triton.jit
def _depths(t, hi, tree):
    """Return key positions t, with the depths in place of positions for the call's own tokens."""
    return tl.load(tree.positions_ptr + t - tree.own_begin, mask=(t >= tree.own_begin) & (t < hi), other=t)


@triton.jit
def _products(q, k, score, UPCAST: tl.constexpr):
    """Return q.k, added to `score` if there is one."""
    # The interpreter multiplies bfloat16 as integers, so there a dot's operands are float32.
    if UPCAST:
        return tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), score, input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(k), score, input_precision="ieee")


@triton.jit
def _accumulate(m, total, acc, k, other, rest, v, t, live, queries, terms, MASKED: tl.constexpr):
    """Add keys at positions t to an online softmax. With MASKED, `live` says which rows attend to which keys.

    For the first keys, m and total are None. `other` and `rest` are parts of latent rows besides k.
    """
    q = queries.q
    score = _products(q, k, None, queries.UPCAST)
    if queries.VALUE_SPLITS > 1:
        score = _products(queries.other, other, score, queries.UPCAST)
    if queries.ROPE_COLUMNS > 0:
        score = _products(queries.rest, rest, score, queries.UPCAST)
    factor = queries.factor
    if not terms.PLAIN:
        if queries.ROWS:
            score *= factor[:, None]
        else:
            score *= factor
        score = _with_terms(score, t, queries.pos, queries.slope, terms)
        factor = 1.0
    if MASKED:
        score = tl.where(live, score, float("-inf"))
    ROWS: tl.constexpr = queries.ROWS and terms.PLAIN
    p, m, total, acc = _rescale(score, m, total, acc, factor, MASKED, ROWS, queries.LAZY, queries.SHIFT)
    if queries.UPCAST:
        acc = tl.dot(p.to(q.dtype).to(tl.float32), v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")
    return m, total, acc


@triton.jit
def _blocks(source, block, stride_b):
    """Return pointers to blocks. Their offsets are computed in bytes, which saves a shift.

    For block -1 the pointer is arbitrary and never read.
    """
    SIZE: tl.constexpr = source.dtype.element_ty.primitive_bitwidth // 8
    if SIZE == 1 and isinstance(stride_b, tl.tensor) and stride_b.dtype == tl.int32:
        return source + tl.cast(tl.cast(block, tl.uint32), tl.uint64) * tl.cast(tl.cast(stride_b, tl.uint32), tl.uint64)
    apart = tl.cast(tl.cast(block, tl.uint32), tl.uint64) * (tl.cast(stride_b, tl.uint64) * SIZE)
    return (source.to(tl.pointer_type(tl.uint8)) + apart).to(source.dtype)


@triton.jit
def _row_pointers(
    source, block, start, second, stride_b, stride_t,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NARROW: tl.constexpr = False,
):  # fmt: skip
    """Return pointers to a step's keys or values.

    Terms that are the same in every step are separate, so that they can be computed once. NARROW: a block has fewer
    than 2**31 elements.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    rows = _blocks(source, block, stride_b)
    if NARROW and BLOCK_N <= TILE and BLOCK_SIZE % BLOCK_N == 0:
        # Computed in each step, because registers are too few to keep the parts that stay the same.
        pointers = rows + ((start % BLOCK_SIZE + offs_n)[:, None] * stride_t + offs_d[None, :])
    elif BLOCK_N <= TILE and BLOCK_SIZE % BLOCK_N == 0:
        rows += tl.cast(start % BLOCK_SIZE, tl.int64) * stride_t
        pointers = rows + (offs_n.to(tl.int64)[:, None] * stride_t + offs_d[None, :])
    elif TILE % BLOCK_SIZE == 0:
        pointers = rows[:, None] + ((offs_n % BLOCK_SIZE).to(tl.int64) * stride_t)[:, None] + offs_d[None, :]
    else:
        t = _key_positions(start, second, BLOCK_N)
        pointers = rows[:, None] + ((t % BLOCK_SIZE).to(tl.int64) * stride_t)[:, None] + offs_d[None, :]
    return pointers


@triton.jit
def _load_rows(
    pointers, present, dtype: tl.constexpr,
    MASKED: tl.constexpr, CODES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load keys or values, with 0 for absent ones."""
    offs_d = tl.arange(0, BLOCK_D)
    if MASKED:
        mask = tl.broadcast_to(present[:, None], [BLOCK_N, BLOCK_D])
        if HEAD_DIM != BLOCK_D:
            mask = mask & (offs_d[None, :] < HEAD_DIM)
        rows = tl.load(pointers, mask=mask, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        rows = tl.load(pointers, mask=tl.broadcast_to(offs_d[None, :] < HEAD_DIM, [BLOCK_N, BLOCK_D]), other=0.0)
    else:
        rows = tl.load(pointers)
    if CODES >= E4M3_BITS:
        rows = small_e4m3(rows, CODES == E4M3_PACKED)
    elif CODES == PACKED_CODES or CODES == LOCAL_CODES:  # noqa: SIM109  triton knows no `in`
        rows = packed_codes(rows, CODES == LOCAL_CODES)
    return rows.to(dtype)


@triton.jit
def _load_step(
    cache, block, start, second, present, dtype: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Load a step's keys, the other parts of latent rows, and values, with 0 for absent ones."""
    keys = _row_pointers(
        cache.key_ptr, block, start, second, cache.stride_kb, cache.stride_kt,
        cache.BLOCK_SIZE, BLOCK_N, cache.BLOCK_D, cache.VALUE_SPLITS > 1,
    )  # fmt: skip
    if cache.ROPE_COLUMNS > 0:
        behind = _row_pointers(
            cache.key_ptr + cache.behind, block, start, second, cache.stride_kb, cache.stride_kt,
            cache.BLOCK_SIZE, BLOCK_N, cache.BLOCK_R, cache.VALUE_SPLITS > 1,
        )  # fmt: skip
        k = _load_rows(keys, present, dtype, MASKED, cache.CODES, cache.HEAD_DIM, BLOCK_N, cache.BLOCK_D)
        rest = _load_rows(behind, present, dtype, MASKED, cache.CODES, cache.ROPE_COLUMNS, BLOCK_N, cache.BLOCK_R)
        other = k
        if cache.VALUE_SPLITS > 1:
            pointers = _row_pointers(
                cache.key_ptr + cache.other, block, start, second, cache.stride_kb, cache.stride_kt,
                cache.BLOCK_SIZE, BLOCK_N, cache.BLOCK_D, cache.VALUE_SPLITS > 1,
            )  # fmt: skip
            other = _load_rows(pointers, present, dtype, MASKED, cache.CODES, cache.HEAD_DIM, BLOCK_N, cache.BLOCK_D)
        return k, other, rest, k
    else:
        values = _row_pointers(
            cache.value_ptr, block, start, second, cache.stride_vb, cache.stride_vt,
            cache.BLOCK_SIZE, BLOCK_N, cache.BLOCK_V,
        )  # fmt: skip
        k = _load_rows(keys, present, dtype, MASKED, cache.CODES, cache.HEAD_DIM, BLOCK_N, cache.BLOCK_D)
        v = _load_rows(values, present, dtype, MASKED, cache.CODES, cache.VALUE_DIM, BLOCK_N, cache.BLOCK_V)
        return k, k, k, v


@triton.jit
def _step(
    m, total, acc, start, second, block, walk, MASKED: tl.constexpr, SCATTERED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Run one step of the online softmax over the keys from `start` and `second` on, whose block numbers are known."""
    q = walk.queries.q
    t = _key_positions(start, second, BLOCK_N)
    present = t
    live = t
    if MASKED:
        key_begin = walk.key_begin
        ahead = _ahead(_key_positions(start - key_begin, second - key_begin, BLOCK_N), 0)
        ahead = tl.where(block >= 0, ahead, ABSENT)
        present = _within(ahead, walk.lo, walk.hi, key_begin, walk.mask)
        row_lo, row_hi = _row_spans(walk.queries.pos, walk.hi, key_begin, walk.mask)
        live = _within(ahead[None, :], row_lo[:, None], row_hi[:, None], key_begin, walk.mask)
        if walk.TREE:
            live = present[None, :] & _tree_scores(live, t, walk.hi, walk.tree)
        if SCATTERED:
            # Between distant queries a tile has keys that no row attends to, whose memory may hold NaN.
            present = tl.max(tl.broadcast_to(live, [q.shape[0], BLOCK_N]).to(tl.int32), 0) > 0
    k, other, rest, v = _load_step(walk.cache, block, start, second, present, q.dtype, MASKED, BLOCK_N)
    if walk.TREE and MASKED:  # noqa: SIM102  the first is known to the compiler
        if walk.terms.ALIBI and walk.tree.positions_ptr is not None:
            t = _depths(t, walk.hi, walk.tree)
    return _accumulate(m, total, acc, k, other, rest, v, t, live, walk.queries, walk.terms, MASKED)


@triton.jit
def _first_tile(i, i_end, walk, SCATTERED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Start the online softmax with the i-th live tile, or with no key if i is not below i_end, without a loop."""
    m = None
    total = None
    acc = tl.zeros([walk.queries.q.shape[0], walk.cache.BLOCK_V], tl.float32)
    for piece in tl.static_range(TILE // BLOCK_N):
        start, second = _step_start(piece, i, i_end, i_end, 0, walk.hi, walk.tiles, walk.mask.BOUNDED, BLOCK_N)
        if piece == 0 or start < walk.hi:
            block = _block_numbers(
                walk.tiles.table_ptr, start, second, walk.hi, False, walk.cache.BLOCK_SIZE, BLOCK_N
            )  # fmt: skip
            m, total, acc = _step(m, total, acc, start, second, block, walk, True, SCATTERED, BLOCK_N)
    return m, total, acc


@triton.jit
def _walk(
    m, total, acc, i_begin, i_end, jump, skip, walk,
    MASKED: tl.constexpr, SCATTERED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the live tiles [i_begin, i_end) to an online softmax.

    Their numbers do not count the `skip` tiles that begin at tile `jump`. Without MASKED, every row must attend to all
    keys of these tiles, and every step must be full.
    """
    SINKS: tl.constexpr = MASKED and walk.mask.BOUNDED
    BLOCK_SIZE: tl.constexpr = walk.cache.BLOCK_SIZE
    hi = walk.hi
    steps = tl.maximum(i_end - i_begin, 0) * TILE
    steps = (steps + BLOCK_N - 1) // BLOCK_N
    start, second = _step_start(0, i_begin, i_end, jump, skip, hi, walk.tiles, SINKS, BLOCK_N)
    block = _block_numbers(walk.tiles.table_ptr, start, second, hi, not MASKED, BLOCK_SIZE, BLOCK_N)
    for j in tl.range(0, steps):
        next_start, next_second = _step_start(j + 1, i_begin, i_end, jump, skip, hi, walk.tiles, SINKS, BLOCK_N)
        next_block = _block_numbers(
            walk.tiles.table_ptr, next_start, next_second, hi, not MASKED, BLOCK_SIZE, BLOCK_N
        )  # fmt: skip
        m, total, acc = _step(m, total, acc, start, second, block, walk, MASKED, SCATTERED, BLOCK_N)
        start = next_start
        second = next_second
        block = next_block
    return m, total, acc
