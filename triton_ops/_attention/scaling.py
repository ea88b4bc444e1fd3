"""What stands around the walk over keys: queries made ready for their products, and rows written with their scales."""

from __future__ import annotations

from .._triton import tl, triton
from .keys import E4M3_BITS
from .scores import _product_factor
from .softmax import _finish


@triton.jit
def _halved(q):
    """Rows of q as float16 after a division by a power of two each, which is the second result."""
    wide = q.to(tl.float32)
    top = tl.max(tl.abs(wide), 1)
    # Within these bounds both the power and its inverse are normal numbers, made by their exponents alone.
    top = tl.minimum(tl.maximum(top, 2.0**-120), 2.0**126)
    exponent = top.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(tl.float16), exponent.to(tl.float32, bitcast=True)


@triton.jit
def _scaled_queries(
    q, scale, k_scale_ptr, kv_head, terms, SCALES: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr
):
    """Queries, and the factor that their products are multiplied by first (ROWS: one a row)."""
    qk_scale = scale
    if SCALES > 0:
        qk_scale *= tl.cast(tl.load(k_scale_ptr + kv_head * (SCALES - 1)), tl.float32)
    if CODES >= E4M3_BITS:
        qk_scale *= 256.0
    # A softmax step takes the maximum before it multiplies, and -inf times 0 is NaN: the factor is made positive. Where
    # nothing changes them, queries go to the matrix unit from shared memory.
    if SCALES > 0:
        q = tl.where(qk_scale < 0, -q, q)
    elif terms.NEGATIVE:
        q = -q
    factor = _product_factor(tl.maximum(tl.abs(qk_scale), 1e-30), terms)
    if ROWS:
        # Codes are exact in float16, and it takes one instruction for two of them where bfloat16 takes four.
        q, power = _halved(q)
        factor = factor * power
    return q, factor


@triton.jit
def _end_rows(
    acc, m, total, v_scale_ptr, kv_head, sinks_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    q_token, head, mask_m, is_split, split_row, token,
    EQUAL_SPLITS: tl.constexpr, SINKS: tl.constexpr, SCALES: tl.constexpr, CODES: tl.constexpr,
    WITH_LSE: tl.constexpr, NUM_HEADS: tl.constexpr, SPLIT_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes the rows of an online softmax: their part, from split_row on by token and head, or what they are."""
    if SCALES > 0:
        acc *= tl.cast(tl.load(v_scale_ptr + kv_head * (SCALES - 1)), tl.float32)
    if CODES >= E4M3_BITS:
        acc *= 256.0
    if EQUAL_SPLITS:
        # One split or many, the same roundings in the same order.
        safe_total = tl.where(total == 0, 1.0, total)
        acc = acc / safe_total[:, None]
        m += tl.log2(safe_total)
        total = tl.where(total == 0, 0.0, 1.0)
    if is_split:
        offs_v = tl.arange(0, BLOCK_V)
        denominator = tl.where(total == 0, 1.0, total)
        row_out = split_row + tl.cast(token, tl.int64) * SPLIT_HEADS + head
        tl.store(
            partial_ptr + row_out[:, None] * VALUE_DIM + offs_v[None, :], acc / denominator[:, None],
            mask=mask_m[:, None] & (offs_v[None, :] < VALUE_DIM),
        )  # fmt: skip
        tl.store(partial_lse_ptr + row_out, m + tl.log2(denominator), mask=mask_m)
    else:
        _finish(
            acc, m, total, sinks_ptr, out_ptr, lse_ptr, q_token, head, mask_m, 0,
            SINKS, WITH_LSE, NUM_HEADS, VALUE_DIM, BLOCK_V,
        )  # fmt: skip
