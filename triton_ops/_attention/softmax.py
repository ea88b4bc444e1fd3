"""The online softmax that every attention kernel shares. Scores are kept in base 2: exp2 is one instruction."""

from __future__ import annotations

from .._triton import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rescale(
    score, m, total, acc, factor, MASKED: tl.constexpr, ROWS: tl.constexpr, LAZY: tl.constexpr, SHIFT: tl.constexpr
):
    """Weights of a tile of scores, and m, total and acc brought to its maximum; total with the weights added.

    For the first tile m and total are None, and acc is 0. `factor` is above 0 and brings scores to base 2; ROWS: one a
    row. LAZY: total has a column per key of a tile, summed at the end. Weights are up to 2**SHIFT: in float16 small
    ones then lose nothing.
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
    """Adds the sinks to the denominator and writes lse and, from column first_v on, out of rows (q_token, head)."""
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
