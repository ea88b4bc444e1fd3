"""Recency with credit for blocks that came back, and a memory of what was evicted.

A block's worth is `last use + credit * n`, in requests: n is how often it was used, at most 4, and 0 for a block used
once. The credit is the median time between two uses of a block in the traffic seen, or half of it, or nothing, which
is lru: as it pays; see `credit`. Counts and times survive eviction as ghosts. A block is worth at least what the
blocks behind it are, since they cannot be hit without it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..policies.base import PoolView
from ..policies.ghosts import Ghosts
from ..policies.run_queue import QueuedPolicy, compact_together
from ..table import Ids
from .credit import EVERY, CreditChooser

LEVELS = 4
GHOSTS = 4  # places a block of the pool, of 8 bytes; 12 gain 2 % more at 1 % capacity on the conversation trace
BINS = 4  # bins of the interval histogram an octave
DECAY = 1.002  # growth of the weight of each newer observation: about 500 requests count
PRIOR_INTERVAL, PRIOR_WEIGHT = 1024, 10_000
"""Until intervals have been seen (long ones come late) they are taken to be long; weight in block uses. On the first
half of the conversation trace the prior hits 1 % more at 3 % capacity and 1 % less at 1 %."""
WRAP = 1 << 28  # requests after which the times that ghosts keep begin anew
WORTH = [0.0, 2.0, 3.0, 4.0]  # credits that a level of use is worth
EACH = np.arange(1, LEVELS + 1, dtype=np.int8)


class Segmented(QueuedPolicy):
    """One queue in order of last use for each level of use; the least worth of the heads goes first.

    Examples:
        >>> pc.CacheManager(num_blocks=8, policy="segmented").pools[0].policy.__class__.__name__
        'Segmented'
    """

    num_queues = LEVELS

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._level = np.zeros(pool.num_blocks, np.int8)
        self._last_use = np.zeros(pool.num_blocks, np.int64)
        self._ghosts = Ghosts(GHOSTS * pool.num_blocks)
        self._begin()

    def _begin(self) -> None:
        self._requests = 0
        self._chooser = CreditChooser(self.pool.num_blocks, WORTH)
        self._weight = 1.0
        self._histogram = np.zeros(32 * BINS)
        self._histogram[int(BINS * np.log2(PRIOR_INTERVAL))] = PRIOR_WEIGHT
        self.interval = float(PRIOR_INTERVAL)

    def accessed(self, ids: Ids, hit: bool) -> None:
        if hit:
            level, last_use = self._level.take(ids), self._last_use.take(ids)
            waited = self.pool.ref_count.take(ids) == 1
            if np.count_nonzero(waited) == ids.size:
                self._chooser.came_back(last_use, level, hit=True)
            else:
                self._chooser.came_back(last_use[waited], level[waited], hit=True)
            self._observe(last_use[level < LEVELS])
            self._level[ids] = np.minimum(level + 1, LEVELS)
            self._ticket_of[ids] = -1

    def completed(self, ids: Ids) -> None:
        noted = self._ghosts.recall(self.pool.keys_of(ids), forget=True)
        level = noted % LEVELS + 1
        known = noted >= 0
        last_use = self._unwrap(noted[known])
        self._chooser.came_back(last_use, level[known], hit=False)
        self._level[ids] = np.where(known, np.minimum(level + 1, LEVELS), 1)
        self._observe(last_use[level[known] < LEVELS])

    def _unwrap(self, noted: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """The last uses that ghosts were noted with."""
        age = (self._requests - noted.astype(np.int64) // LEVELS) % WRAP
        last_use: npt.NDArray[np.int64] = self._requests - age
        return last_use

    def _observe(self, last_use: npt.NDArray[np.int64]) -> None:
        """Learns from the times between the last uses of blocks and now."""
        if not last_use.size:
            return
        intervals = self._requests + 1 - last_use
        bins = (BINS * np.log2(intervals)).astype(np.intp)
        self._histogram += np.bincount(bins, minlength=self._histogram.size) * self._weight
        self._weight *= DECAY
        if self._weight > 1e9:
            self._histogram /= self._weight
            self._weight = 1.0

    def released(self, ids: Ids) -> None:
        self._requests += 1
        ids = ids[::-1]
        level = np.maximum.accumulate(self._level.take(ids))
        self._level[ids] = level
        self._last_use[ids] = self._requests
        ends = level.searchsorted(EACH, side="right").tolist()
        for n, (queue, start, end) in enumerate(zip(self.queues, [0, *ends], ends, strict=False)):
            if start < end:
                queue.push(LEVELS * self._requests + n, ids[start:end].copy())
        compact_together(self.queues, self.pool.num_blocks)
        if self._requests % EVERY == 0:
            total = self._histogram.cumsum()
            self.interval = float(2 ** ((int(total.searchsorted(total[-1] / 2)) + 0.5) / BINS))  # the median
        self._chooser.released(self._requests, ends, self.pool.num_held, self.interval)

    def _due(self, level: int) -> float:
        head = self.queues[level].head()
        if head is None:
            return float("inf")
        return head // LEVELS + self._chooser.share * self.interval * WORTH[level]

    def next_victims(self, count: int) -> Ids:
        due = [self._due(level) for level in range(LEVELS)]
        return self.queues[due.index(min(due))].pop(count)

    def victims(self, count: int) -> Ids:
        ids = super().victims(count)
        noted = (self._last_use.take(ids) % WRAP) * LEVELS + self._level.take(ids) - 1
        lost = self._ghosts.remember(self.pool.keys_of(ids), noted.astype(np.int32))
        self._chooser.forgotten(self._unwrap(lost), lost % LEVELS + 1)
        return ids

    def removed(self, ids: Ids) -> None:
        super().removed(ids)
        self._chooser.left(self._last_use.take(ids), self._level.take(ids))

    def clear(self) -> None:
        super().clear()
        self._last_use.fill(0)  # else a use after the reset would lie before the last one
        self._ghosts.clear()
        self._begin()
