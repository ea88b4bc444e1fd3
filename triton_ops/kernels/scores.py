"""Modifiers of a score besides scale * q.k, and the online softmax, in base 2, because exp2 is one instruction."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent to float32 accuracy, also near 0, where 1 - exp cancels."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    small = 1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * 0.021869488)))
    return tl.where(tl.abs(x) < 0.25, x * small, tl.where(x < 0, -large, large))


@triton.jit
def _product_factor(factor, terms):
    """Return the factor of products q.k, given the scale. Without softcap it includes log2(e), for base 2."""
    if terms.SOFTCAP:
        factor /= terms.softcap
    else:
        factor *= LOG2E
    return factor


@triton.jit
def _slopes(alibi_ptr, head, mask_m, terms):
    """Return ALiBi's slope of each row, in base 2."""
    slope = tl.zeros(head.shape, tl.float32)
    if terms.ALIBI:
        slope = tl.load(alibi_ptr + head, mask=mask_m, other=0.0).to(tl.float32) * LOG2E
    return slope


@triton.jit
def _with_terms(score, t, pos, slope, terms):
    """Turn products that `_product_factor` has scaled into scores in base 2: [queries at pos, keys at t]."""
    if terms.SOFTCAP:
        score = _tanh(score) * (terms.softcap * LOG2E)
    if terms.ALIBI:
        score += slope[:, None] * (t[None, :] - pos[:, None]).to(tl.float32)
    return score


@triton.jit
def _rescale(
    score, m, total, acc, factor, MASKED: tl.constexpr, ROWS: tl.constexpr, LAZY: tl.constexpr, SHIFT: tl.constexpr
):
    """Return a tile's weights, the running maximum m, total with these weights, and acc without them, rescaled to m.

    For the first tile m and total are None, and acc is 0. `factor` is above 0 and brings scores to base 2. ROWS: it has
    one number for each row. LAZY: total has a column for each key of a tile, summed at the end. Weights are up to
    2**SHIFT, so that small weights lose nothing in float16.
    """
    top = tl.max(score, 1) * factor
    if SHIFT != 0:
        top -= SHIFT
    m_new = top
    if m is not None:
        m_new = tl.maximum(m, top)
    safe = m_new
    if MASKED:
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    if ROWS:
        factor = factor[:, None]
    p = tl.exp2(score * factor - safe[:, None])
    added = p if LAZY else tl.sum(p, 1)
    if m is None:
        total = added
    else:
        alpha = tl.exp2(m - safe)
        total = total * (alpha[:, None] if LAZY else alpha) + added
        acc = acc * alpha[:, None]
    return p, m_new, total, acc


@triton.jit
def _finish(
    acc, m, total, sinks_ptr, out_ptr, lse_ptr, q_token, head, mask_m, first_v,
    SINKS: tl.constexpr, WITH_LSE: tl.constexpr, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add the sinks to the denominator; write lse and, from column first_v on, out of rows (q_token, head)."""
    offs_v = first_v + tl.arange(0, BLOCK_V)
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
        out_ptr + row[:, None] * VALUE_DIM + offs_v[None, :],
        (acc / denominator[:, None]).to(out_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_v[None, :] < VALUE_DIM),
    )
    if WITH_LSE:  # noqa: SIM102  the first is known to the compiler
        if first_v == 0:
            tl.store(lse_ptr + row, (m + tl.log2(denominator)) * LN2, mask=mask_m)
