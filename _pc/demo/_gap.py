"""What the demo does to show reuse behind gaps: between questions about a document, the middle of it is evicted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..cache import EvictionPolicy
from ..cache.policies import PoolView
from ..cache.table import Ids


class MiddleFirst(EvictionPolicy):
    """Gives up what is in the middle of the longest prompt: beginning and end of a document stay.

    Policies that give up the tail first leave no gaps. This one stands for those that do: hints by ranges of a prompt,
    scores by attention.
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._waiting: npt.NDArray[np.bool_] = np.zeros(pool.num_blocks, np.bool_)

    def accessed(self, ids: Ids, hit: bool) -> None:
        self._waiting[ids] = False

    def released(self, ids: Ids) -> None:
        self._waiting[ids] = True

    def victims(self, count: int) -> Ids:
        ids = self._waiting.nonzero()[0].astype(np.int32)
        place = self.pool.prefix_length[ids]
        chosen = ids[np.argsort(np.abs(2 * place - place.max(initial=0)), kind="stable")[:count]]
        self._waiting[chosen] = False
        return chosen

    def removed(self, ids: Ids) -> None:
        self._waiting[ids] = False

    def clear(self) -> None:
        self._waiting[:] = False


def blocks_for(prompt_tokens: int, new_tokens: int, block_size: int) -> int:
    """Blocks of a pool that holds one such request, and hardly anything beside it."""
    return -(-(prompt_tokens + new_tokens) // block_size) + 1
