"""Modifiers of a score besides scale * q.k, on the CPU. `kernels/scores.py` is their counterpart in kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ScoreModifiers(NamedTuple):
    """The options that change a score. PLAIN: no option is set. NEGATIVE: scale is below 0."""

    softcap: float
    SOFTCAP: bool
    ALIBI: bool
    PLAIN: bool
    NEGATIVE: bool

    def apply(self, score: torch.Tensor, distance: torch.Tensor, alibi_slopes: torch.Tensor | None) -> torch.Tensor:
        """Modify scores `[num_heads, queries, keys]`, scale * q.k, in place.

        `distance` is the key's position minus the query's.
        """
        if self.SOFTCAP:
            score = score.div_(self.softcap).tanh_().mul_(self.softcap)
        if alibi_slopes is not None:
            score += alibi_slopes.float().view(-1, 1, 1) * distance
        return score
