"""Numbers of many requests behind each other: arrays of their own are cold in memory when they are read together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]

ROOM = 4096
"""Numbers written to one piece of memory."""


class Strip:
    """Notes of so many numbers a request.

    Args:
        dtype: Of the numbers.
        most: How many are noted at a time, roughly.

    Attributes:
        sizes: How many numbers each note has.
        total: Of all notes.
    """

    def __init__(self, dtype: type, most: int) -> None:
        self._room = np.empty(min(ROOM, most), dtype)
        self._at = 0
        self._full: list[Numbers] = []
        self.sizes: list[int] = []
        self.total = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._room.nbytes + sum(part.nbytes for part in self._full)

    def note(self, numbers: Numbers, size: int) -> None:
        """Adds some numbers; copies them."""
        start = self._at
        end = start + size
        if end > len(self._room):
            if start:
                self._full.append(self._room[:start].copy())
            start, end = 0, size
            if size > len(self._room):
                self._full.append(numbers.astype(self._room.dtype))
                end = 0
        if end:
            self._room[start:end] = numbers
        self._at = end
        self.sizes.append(size)
        self.total += size

    def taken(self) -> tuple[Numbers, list[int]]:
        """All numbers, to be read before more are noted, and the sizes; nothing is noted any more."""
        numbers, sizes = self._room[: self._at], self.sizes
        if self._full:
            numbers = np.concatenate((*self._full, numbers))
            self._full = []
        self._at, self.sizes, self.total = 0, [], 0
        return numbers, sizes
