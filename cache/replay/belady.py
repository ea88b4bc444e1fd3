"""The optimum that knows the future, for replays only: gives up the block whose next use lies farthest ahead."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..policies import EvictionPolicy, PoolView
from ..table import Ids
from .traces import BlockIds, digests_of

NEVER = 1 << 60


class Belady(EvictionPolicy):
    """Belady's rule over whole requests; among blocks of one next use the longest prefix goes first.

    Args:
        requests: Block ids of every request to come, in order.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "belady", capacity=3).hit_rate, 2)
        0.5
    """

    def __init__(self, requests: Sequence[BlockIds]) -> None:
        self._uses: dict[int, deque[int]] = {}
        for number, ids in enumerate(requests):
            for key in digests_of(ids)[:, 0].tolist():
                self._uses.setdefault(key, deque()).append(number)
        self._now = 0

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._heap: list[tuple[int, int, int]] = []
        self._entry: dict[int, tuple[int, int, int]] = {}

    def accessed(self, ids: Ids, hit: bool) -> None:
        for block in ids.tolist():
            self._entry.pop(block, None)

    def finished(self, output_tokens: int) -> None:
        self._now += 1

    def released(self, ids: Ids) -> None:
        lengths: Any = self.pool.prefix_length[ids].tolist()
        for block, key, length in zip(ids.tolist(), self.pool.keys_of(ids).tolist(), lengths, strict=True):
            uses = self._uses[key]
            while uses and uses[0] < self._now:
                uses.popleft()
            entry = (-(uses[0] if uses else NEVER), -length, block)
            self._entry[block] = entry
            heapq.heappush(self._heap, entry)

    def victims(self, count: int) -> Ids:
        chosen: list[int] = []
        while len(chosen) < count:
            entry = heapq.heappop(self._heap)
            if self._entry.get(entry[2]) == entry:
                del self._entry[entry[2]]
                chosen.append(entry[2])
        return np.array(chosen, np.int32)

    def removed(self, ids: Ids) -> None:
        for block in ids.tolist():
            self._entry.pop(block, None)

    def clear(self) -> None:
        self._heap.clear()
        self._entry.clear()
