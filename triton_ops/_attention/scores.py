"""What a score is besides scale * q.k: the options that change it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._triton import tl, triton
from .softmax import LOG2E


class Terms(NamedTuple):
    """The options that change a score; PLAIN: none of them is given. NEGATIVE: scale is below 0."""

    softcap: float
    SOFTCAP: bool
    ALIBI: bool
    PLAIN: bool
    NEGATIVE: bool

    def apply(self, score: torch.Tensor, distance: torch.Tensor, alibi_slopes: torch.Tensor | None) -> torch.Tensor:
        """Scores `[num_heads, queries, keys]` brought to what they are, in place.

        Args:
            score: scale * q.k in float32.
            distance: `[queries, keys]`, key position less query position.
            alibi_slopes: `[num_heads]`.
        """
        if self.SOFTCAP:
            score = score.div_(self.softcap).tanh_().mul_(self.softcap)
        if alibi_slopes is not None:
            score += alibi_slopes.float().view(-1, 1, 1) * distance
        return score


@triton.jit
def _tanh(x):
    """Hyperbolic tangent to float32 accuracy, also near 0 where 1 - exp cancels."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    large = (1.0 - e) / (1.0 + e)
    y = x * x
    small = 1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * 0.021869488)))
    return tl.where(tl.abs(x) < 0.25, x * small, tl.where(x < 0, -large, large))


@triton.jit
def _product_factor(factor, terms):
    """What products q.k are multiplied by first: `factor` is scale, without terms in base 2."""
    if terms.SOFTCAP:
        factor /= terms.softcap
    else:
        factor *= LOG2E
    return factor


@triton.jit
def _slopes(alibi_ptr, head, mask_m, terms):
    """ALiBi's slope of each row, in base 2."""
    slope = tl.zeros(head.shape, tl.float32)
    if terms.ALIBI:
        slope = tl.load(alibi_ptr + head, mask=mask_m, other=0.0).to(tl.float32) * LOG2E
    return slope


@triton.jit
def _with_terms(score, t, pos, slope, terms):
    """Scores in base 2 of products that `_product_factor` was applied to: [queries at pos, keys at t]."""
    if terms.SOFTCAP:
        score = _tanh(score) * (terms.softcap * LOG2E)
    if terms.ALIBI:
        score += slope[:, None] * (t[None, :] - pos[:, None]).to(tl.float32)
    return score
