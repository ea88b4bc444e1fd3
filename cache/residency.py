"""How long evicted blocks had been there: a histogram in ticks of a pool's clock."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BOUNDS = 1 << np.arange(0, 21, 2)
"""Upper bounds in ticks: 1, 4, 16 ... about a million."""

Ticks = npt.NDArray[np.int64]


class Residency:
    """Counts evicted blocks by age; sorts them in only when asked, or when many wait.

    Attributes:
        evictions: Blocks evicted so far.
    """

    __slots__ = ("_counts", "_sum", "_waiting", "evictions")

    def __init__(self) -> None:
        self.clear()

    def add(self, now: int, then: Ticks) -> None:
        """Blocks evicted at tick `now` that were taken at `then`."""
        self.evictions += then.size
        self._waiting.append((now, then))
        if len(self._waiting) > 256:
            self.totals()

    def totals(self) -> tuple[Ticks, int]:
        """Evicted blocks by age, one count for each of `BOUNDS` and one beyond, and the sum of their ages."""
        if self._waiting:
            ages = np.concatenate([now - then for now, then in self._waiting])
            self._waiting.clear()
            self._counts += np.bincount(BOUNDS.searchsorted(ages), minlength=self._counts.size)
            self._sum += int(ages.sum())
        return self._counts, self._sum

    def clear(self) -> None:
        """Forgets all."""
        self.evictions = 0
        self._waiting: list[tuple[int, Ticks]] = []
        self._counts = np.zeros(BOUNDS.size + 1, np.int64)
        self._sum = 0
