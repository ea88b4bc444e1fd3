"""A bounded memory of blocks that were evicted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.int32]


class Ghosts:
    """Remembers a number for each of the blocks evicted lately, by the first word of their hash.

    A direct-mapped table of 8 bytes an entry: a newer ghost simply takes the place of an older one. Two blocks are
    taken for each other with a chance of 2**-32, which costs a wrong guess and no more.

    Args:
        capacity: Ghosts to remember at least, rounded up to a power of two.
    """

    def __init__(self, capacity: int) -> None:
        size = 1 << max(4, (capacity - 1).bit_length())
        self._tags = np.zeros(size, np.uint32)
        self._values = np.full(size, -1, np.int32)
        self._mask = np.uint64(size - 1)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._tags.nbytes + self._values.nbytes

    def remember(self, keys: Keys, values: Values) -> None:
        """Notes a number of at least 0 for each key."""
        slots = (keys & self._mask).astype(np.intp)
        self._tags[slots] = (keys >> np.uint64(32)).astype(np.uint32)
        self._values[slots] = values

    def recall(self, keys: Keys) -> Values:
        """What was noted for each key, -1 where nothing is known."""
        slots = (keys & self._mask).astype(np.intp)
        values: Values = self._values.take(slots)
        values[self._tags.take(slots) != (keys >> np.uint64(32)).astype(np.uint32)] = -1
        return values

    def clear(self) -> None:
        """Forgets everything."""
        self._values.fill(-1)
