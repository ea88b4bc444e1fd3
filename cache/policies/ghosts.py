"""A bounded memory of blocks that were evicted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..table import count_nonzero

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.int32]
HALF = np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)


class Ghosts:
    """Remembers a number for each of the blocks evicted lately, by the first word of their hash.

    A direct-mapped table of 8 bytes an entry: a newer ghost simply takes the place of an older one. Two blocks are
    taken for each other with a chance of 2**-32, which costs a wrong guess and no more.

    Args:
        capacity: Places; of as many ghosts about a third has been overwritten by others.

    Examples:
        >>> from pc.cache.policies import Ghosts
        >>> ghosts, keys = Ghosts(capacity=64), np.array([1 << 40, 2 << 40], np.uint64)
        >>> lost = ghosts.remember(keys, np.array([7, 8], np.int32))
        >>> ghosts.recall(np.array([2 << 40, 3 << 40], np.uint64)).tolist()
        [8, -1]
    """

    def __init__(self, capacity: int) -> None:
        size = max(16, capacity)
        self._tags = np.zeros(size, np.uint32)
        self._values = np.full(size, -1, np.int32)
        self._size = np.uint64(size)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._tags.nbytes + self._values.nbytes

    def _slots(self, keys: Keys) -> npt.NDArray[np.intp]:
        slots: npt.NDArray[np.intp] = ((keys & LOW) * self._size >> HALF).astype(np.intp)
        return slots

    def remember(self, keys: Keys, values: Values) -> Values:
        """Notes a number of at least 0 for each key, and returns the numbers that are lost for it."""
        slots = self._slots(keys)
        tags = (keys >> HALF).astype(np.uint32)
        old = self._values.take(slots)
        self._tags[slots] = tags
        self._values[slots] = values
        stayed = self._tags.take(slots) == tags
        if count_nonzero(stayed) < stayed.size:
            # Two of these keys fell on one slot: the earlier is lost, and what was there is to be told once.
            return np.concatenate((old[stayed & (old >= 0)], values[~stayed]))
        return old[old >= 0]

    def recall(self, keys: Keys, forget: bool = False) -> Values:
        """What was noted for each key, -1 where nothing is known; `forget` makes it so from then on."""
        slots = self._slots(keys)
        values: Values = self._values.take(slots)
        values[self._tags.take(slots) != (keys >> HALF).astype(np.uint32)] = -1
        if forget:
            self._values[slots[values >= 0]] = -1
        return values

    def clear(self) -> None:
        """Forgets everything."""
        self._values.fill(-1)
