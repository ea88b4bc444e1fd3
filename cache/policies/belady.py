"""The optimum that knows the future, for replays only: gives up the block whose next use lies farthest ahead."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..table import Ids
from .base import EvictionPolicy

if TYPE_CHECKING:
    from ..pool import BlockPool

NEVER = 1 << 60


class Belady(EvictionPolicy):
    """Belady's rule over whole requests; among blocks of one next use the longest prefix goes first.

    Args:
        requests: Block ids of every request to come, in order. The second word of a block's hash is its id.
    """

    def __init__(self, requests: Sequence[npt.NDArray[np.int64]]) -> None:
        self._uses: dict[int, deque[int]] = {}
        for number, ids in enumerate(requests):
            for block in ids.tolist():
                self._uses.setdefault(block, deque()).append(number)
        self._now = 0

    def bind(self, pool: BlockPool) -> None:
        """See `EvictionPolicy`."""
        super().bind(pool)
        self._heap: list[tuple[int, int, int]] = []
        self._entry: dict[int, tuple[int, int, int]] = {}

    def accessed(self, ids: Ids, hit: bool) -> None:
        """See `EvictionPolicy`."""
        for block in ids.tolist():
            self._entry.pop(block, None)

    def finished(self, output_tokens: int) -> None:
        """See `EvictionPolicy`."""
        self._now += 1

    def released(self, ids: Ids) -> None:
        """See `EvictionPolicy`."""
        lengths: Any = self.pool.prefix_length[ids].tolist()
        for block, key, length in zip(ids.tolist(), self.pool.words[ids, 1].tolist(), lengths, strict=True):
            uses = self._uses[key]
            while uses and uses[0] < self._now:
                uses.popleft()
            entry = (-(uses[0] if uses else NEVER), -length, block)
            self._entry[block] = entry
            heapq.heappush(self._heap, entry)

    def victims(self, count: int) -> Ids:
        """See `EvictionPolicy`."""
        chosen: list[int] = []
        while len(chosen) < count:
            entry = heapq.heappop(self._heap)
            if self._entry.get(entry[2]) == entry:
                del self._entry[entry[2]]
                chosen.append(entry[2])
        return np.array(chosen, np.int32)

    def removed(self, ids: Ids) -> None:
        """See `EvictionPolicy`."""
        for block in ids.tolist():
            self._entry.pop(block, None)

    def clear(self) -> None:
        """See `EvictionPolicy`."""
        self._heap.clear()
        self._entry.clear()
