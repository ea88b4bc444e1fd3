"""Statistics of how long evicted blocks had been cached."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ticks = npt.NDArray[np.int64]

# Upper bounds of `Residency` in ticks: 1, 4, 16 ... about a million.
BOUNDS = 1 << np.arange(0, 21, 2)


class Residency:
    """Counts of evicted blocks by how long they had been cached, in ticks of a pool's clock.

    To keep evictions fast, `add` only stores the ticks, and `totals` computes the sums.
    """

    def __init__(self) -> None:
        self._all: tuple[Ticks, int, dict[int, Ticks]] = (np.zeros(BOUNDS.size + 1, np.int64), 0, {})

    def add(self, now: int, then: Ticks) -> None:
        """Count blocks evicted at tick `now` that were allocated at `then`. A second call for a tick does nothing."""
        if now not in self._all[2]:
            if len(self._all[2]) > 256:
                self.totals()
            self._all[2][now] = then

    def totals(self) -> tuple[Ticks, int]:
        """Return counts of evicted blocks by age, for each of `BOUNDS` and beyond, and the sum of their ages."""
        counts, total, waiting = self._all
        if waiting:
            ages = np.concatenate([now - then for now, then in waiting.items()])
            counts = counts + np.bincount(BOUNDS.searchsorted(ages), minlength=counts.size)
            total += int(ages.sum())
            self._all = (counts, total, {})
        return counts, total
