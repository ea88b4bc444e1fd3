"""What a score is besides scale * q.k: the options that change it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Terms(NamedTuple):
    """The options that change a score; PLAIN: none of them is given."""

    softcap: float
    SOFTCAP: bool
    ALIBI: bool
    PLAIN: bool

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
