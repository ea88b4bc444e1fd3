"""The loop over live tiles of keys: where the keys of a step lie, found ahead of it, and what the step adds.

The numbers of a step's blocks are loaded a step before its keys, so that the loads of keys and values wait for nothing
and as many of them are in flight as there are stages.
"""

from __future__ import annotations

from .._quantize import small_e4m3
from .._triton import tl, triton
from .keys import E4M3_BITS, E4M3_PACKED, _key_positions, _load_rows, _row_pointers
from .layout import TILE, kernel_constants
from .predicate import _ahead, _row_spans, _within
from .scores import _with_terms
from .softmax import _rescale

# How far ahead an absent key is: beyond every end.
(ABSENT,) = kernel_constants(1 << 31)


@triton.jit
def _tile_start(i, i_end, jump, skip, hi, tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, SINKS: tl.constexpr):
    """First key of the i-th live tile; `hi`, which no key reaches, from i_end on."""
    exists = i < i_end
    i = tl.where(i < jump, i, i + skip)
    rank = rank_lo + i - n_sink
    if SINKS:
        rank = tl.where(i < n_sink, rank_sink + i, rank)
    tile = tl.load(tiles_ptr + rank, mask=has_holes & exists, other=rank)
    return tl.where(exists, tile * TILE, hi)


@triton.jit
def _step_start(
    step, i_begin, i_end, jump, skip, hi, tiles_ptr, rank_lo, n_sink, rank_sink, has_holes,
    SINKS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First key of a step, and of its second tile where it has one."""
    i = i_begin + step * BLOCK_N // TILE
    start = _tile_start(i, i_end, jump, skip, hi, tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, SINKS)
    second = start
    if BLOCK_N < TILE:
        start += step * BLOCK_N % TILE
    if BLOCK_N > TILE:
        second = _tile_start(i + 1, i_end, jump, skip, hi, tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, SINKS)
    return start, second


@triton.jit
def _block_numbers(table_ptr, start, second, hi, WHOLE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block number of each of a step's keys, or one for all of them; -1 where there is none.

    One load a block, if blocks begin where tiles do and are not too many; else one a key. WHOLE: steps that begin below
    hi end there too.
    """
    SPAN: tl.constexpr = BLOCK_N if BLOCK_N < TILE else TILE
    # Keys that lie in one block wherever a step begins: the power of two in BLOCK_SIZE.
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
            live = key < hi if WHOLE else key + offset < hi
            block = tl.where(part >= i, tl.load(part_ptr, mask=live, other=-1), block)
        return block
    else:
        t = _key_positions(start, second, BLOCK_N)
        return tl.load(table_ptr + t // BLOCK_SIZE, mask=t < hi, other=-1)


@triton.jit
def _tree_scores(live, t, hi, tree_rows, own_begin, tree_keys):
    """`live`, but for the call's own tokens, from own_begin on, what the bits of the rows' masks say."""
    own = t - own_begin
    is_own = (own >= 0) & (t < hi)
    word = tl.load(tree_rows[:, None] + (own // 32)[None, :], mask=(is_own & (own < tree_keys))[None, :], other=0)
    return tl.where(is_own[None, :], (word >> (own & 31)[None, :]) & 1 != 0, live)


@triton.jit
def _depths(own_positions_ptr, t, hi, own_begin):
    """Key positions t, where those of the call's own tokens are their depths."""
    return tl.load(own_positions_ptr + t - own_begin, mask=(t >= own_begin) & (t < hi), other=t)


@triton.jit
def _accumulate(
    q, m, total, acc, pos, slope, k, v, t, live, factor, terms,
    MASKED: tl.constexpr, UPCAST: tl.constexpr, ROWS: tl.constexpr, LAZY: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Adds keys at positions t to an online softmax; `live`: which rows attend to which of them, where MASKED.

    m and total are None where they are the first.
    """
    # The interpreter multiplies bfloat16 as integers, so there the operands of a dot are float32.
    if UPCAST:
        score = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if not terms.PLAIN:
        if ROWS:
            score *= factor[:, None]
        else:
            score *= factor
        score = _with_terms(score, t, pos, slope, terms)
        factor = 1.0
    if MASKED:
        score = tl.where(live, score, float("-inf"))
    p, m, total, acc = _rescale(score, m, total, acc, factor, MASKED, ROWS and terms.PLAIN, LAZY, SHIFT)
    if UPCAST:
        acc = tl.dot(p.to(q.dtype).to(tl.float32), v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")
    return m, total, acc


@triton.jit
def _step(
    q, m, total, acc, pos, slope, start, second, block, key_source, value_source,
    stride_kb, stride_kt, stride_vb, stride_vt,
    lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
    MASKED: tl.constexpr, SCATTERED: tl.constexpr, TREE: tl.constexpr,
    CODES: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, LAZY: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax. Sources are pointers, or descriptors: then stride_kb and stride_vb count rows."""
    t = _key_positions(start, second, BLOCK_N)
    present = t
    live = t
    if MASKED:
        ahead = _ahead(_key_positions(start - key_begin, second - key_begin, BLOCK_N), 0)
        ahead = tl.where(block >= 0, ahead, ABSENT)
        present = _within(ahead, lo, hi, key_begin, mask)
        row_lo, row_hi = _row_spans(pos, hi, key_begin, mask)
        live = _within(ahead[None, :], row_lo[:, None], row_hi[:, None], key_begin, mask)
        if TREE:
            live = present[None, :] & _tree_scores(live, t, hi, tree_rows, own_begin, tree_keys)
        if SCATTERED:
            # Between far queries a tile holds keys that no row attends to: their memory may hold NaN.
            present = tl.max(tl.broadcast_to(live, [q.shape[0], BLOCK_N]).to(tl.int32), 0) > 0
    if DESCRIPTORS:
        # What lies outside of the cache or past HEAD_DIM reads as 0; what must not be seen inside of it is zeroed here.
        k = key_source.load([block * stride_kb + start % BLOCK_SIZE, 0])
        v = value_source.load([block * stride_vb + start % BLOCK_SIZE, 0])
        if MASKED:
            v = tl.where(present[:, None], v, 0.0).to(v.dtype)
        if CODES >= E4M3_BITS:
            k = small_e4m3(k, CODES == E4M3_PACKED)
            v = small_e4m3(v, CODES == E4M3_PACKED)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
    else:
        keys = _row_pointers(key_source, block, start, second, stride_kb, stride_kt, BLOCK_SIZE, BLOCK_N, BLOCK_D)
        values = _row_pointers(value_source, block, start, second, stride_vb, stride_vt, BLOCK_SIZE, BLOCK_N, BLOCK_V)
        k = _load_rows(keys, present, q.dtype, MASKED, CODES, HEAD_DIM, BLOCK_N, BLOCK_D)
        v = _load_rows(values, present, q.dtype, MASKED, CODES, VALUE_DIM, BLOCK_N, BLOCK_V)
    if TREE and MASKED:  # noqa: SIM102  the first is known to the compiler
        if terms.ALIBI and own_positions_ptr is not None:
            t = _depths(own_positions_ptr, t, hi, own_begin)
    return _accumulate(q, m, total, acc, pos, slope, k, v, t, live, factor, terms, MASKED, UPCAST, ROWS, LAZY, SHIFT)


@triton.jit
def _first_tile(
    q, pos, slope, i, i_end,
    tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, table_ptr, key_source, value_source,
    stride_kb, stride_kt, stride_vb, stride_vt,
    lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
    SCATTERED: tl.constexpr, TREE: tl.constexpr, CODES: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, LAZY: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The online softmax of the i-th live tile, or of no key where i is not below i_end; without a loop around it."""
    m = None
    total = None
    acc = tl.zeros([q.shape[0], BLOCK_V], tl.float32)
    for piece in tl.static_range(TILE // BLOCK_N):
        start, second = _step_start(
            piece, i, i_end, i_end, 0, hi, tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, mask.BOUNDED, BLOCK_N
        )
        if piece == 0 or start < hi:
            block = _block_numbers(table_ptr, start, second, hi, False, BLOCK_SIZE, BLOCK_N)
            m, total, acc = _step(
                q, m, total, acc, pos, slope, start, second, block, key_source, value_source,
                stride_kb, stride_kt, stride_vb, stride_vt,
                lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
                True, SCATTERED, TREE, CODES, UPCAST, DESCRIPTORS, ROWS, LAZY, SHIFT,
                BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
            )  # fmt: skip
    return m, total, acc


@triton.jit
def _walk(
    q, m, total, acc, pos, slope, i_begin, i_end, jump, skip,
    tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, table_ptr, key_source, value_source,
    stride_kb, stride_kt, stride_vb, stride_vt,
    lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
    MASKED: tl.constexpr, SCATTERED: tl.constexpr, TREE: tl.constexpr,
    CODES: tl.constexpr, UPCAST: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, LAZY: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds live tiles [i_begin, i_end), counted without the `skip` ones from `jump` on.

    Without MASKED every row attends to all of their keys, and they fill whole steps.
    """
    SINKS: tl.constexpr = MASKED and mask.BOUNDED
    steps = tl.maximum(i_end - i_begin, 0) * TILE
    steps = (steps + BLOCK_N - 1) // BLOCK_N
    start, second = _step_start(
        0, i_begin, i_end, jump, skip, hi, tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, SINKS, BLOCK_N
    )
    block = _block_numbers(table_ptr, start, second, hi, not MASKED, BLOCK_SIZE, BLOCK_N)
    # Triton's pipeliner for sm_100 gives up on values that a descriptor read and a mask changed: these steps are few.
    STAGES: tl.constexpr = 1 if DESCRIPTORS and MASKED and not LAZY else None
    for j in tl.range(0, steps, num_stages=STAGES):
        next_start, next_second = _step_start(
            j + 1, i_begin, i_end, jump, skip, hi, tiles_ptr, rank_lo, n_sink, rank_sink, has_holes, SINKS, BLOCK_N
        )
        next_block = _block_numbers(table_ptr, next_start, next_second, hi, not MASKED, BLOCK_SIZE, BLOCK_N)
        m, total, acc = _step(
            q, m, total, acc, pos, slope, start, second, block, key_source, value_source,
            stride_kb, stride_kt, stride_vb, stride_vt,
            lo, hi, key_begin, mask, factor, terms, tree_rows, own_begin, tree_keys, own_positions_ptr,
            MASKED, SCATTERED, TREE, CODES, UPCAST, DESCRIPTORS, ROWS, LAZY, SHIFT,
            BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V,
        )  # fmt: skip
        start = next_start
        second = next_second
        block = next_block
    return m, total, acc
