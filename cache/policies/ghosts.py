"""A bounded memory of evicted blocks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..table import count_nonzero

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[Any]
Indices = npt.NDArray[np.intp]
HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)

NOTE_BITS = 4
"""Low bits of a number that do not count when the oldest ghost is overwritten."""
TIME_BITS = 32 - NOTE_BITS


class Ghosts:
    """A memory of one number for each recently evicted block, found by the first word of its hash.

    Each ghost takes 8 bytes: half of the word, and the number. In each lookup, two blocks are confused with a
    probability of `ways * 2**-32`, which only costs a wrong guess.

    Args:
        capacity: Number of ghosts.
        ways: Number of places in which the ghost of a block may be stored. With one place, a newer ghost overwrites an
            older one at random: after `capacity` ghosts, about a third have been overwritten. With several places, the
            oldest ghost is overwritten. A number then begins with the ghost's time, `time << NOTE_BITS | note`, and
            only its low 32 bits are kept.

    Examples:
        >>> from pc.cache.policies import Ghosts
        >>> ghosts, keys = Ghosts(capacity=64), np.array([1 << 40, 2 << 40], np.uint64)
        >>> overwritten = ghosts.remember(keys, np.array([7, 8], np.int32))
        >>> ghosts.recall(np.array([2 << 40, 3 << 40], np.uint64)).tolist()
        [8, -1]
    """

    def __init__(self, capacity: int, ways: int = 1) -> None:
        self._num_sets, self._ways = np.uint64(-(-max(16, capacity) // ways)), ways
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held; 0 until the first call of `remember`, because untouched memory takes no room."""
        return self._places.nbytes if self._written else 0

    def _set_of(self, keys: Keys) -> Indices:
        sets: Indices = ((keys & LOW) * self._num_sets >> HALF).astype(np.intp)
        return sets

    def remember(self, keys: Keys, numbers: Numbers, now: int = 0) -> Numbers:
        """Store a number of at least 0 for each key; return the numbers that are overwritten. `now` is the time."""
        if not keys.size:
            return np.empty(0, np.int64)
        self._written = True
        sets = self._set_of(keys)
        ghosts = (numbers.astype(np.uint64) & LOW) + np.uint64(1) | keys & ~LOW
        tags, known = _halves(self._places.take(sets, axis=0))
        age = np.uint32((now + 1 << NOTE_BITS) & 0xFFFFFFFF) - known
        age >>= np.uint32(NOTE_BITS)
        empty = known == 0
        np.copyto(age, np.uint32(1 << TIME_BITS), where=empty)
        same = tags == (keys >> HALF).astype(np.uint32)[:, None]
        if count_nonzero(same):
            age[same & ~empty] = 2 << TIME_BITS
        at = sets * self._ways + age.argmax(axis=1)
        old = self._flat.take(at)
        self._flat[at] = ghosts
        stayed = self._flat.take(at) == ghosts
        lost = _numbers(old[(old != 0) & stayed])
        if count_nonzero(stayed) == stayed.size:
            return lost
        rest = ~stayed  # several of these blocks have the same place
        more = numbers[rest] if self._ways == 1 else self.remember(keys[rest], numbers[rest], now)
        return np.append(lost, more)

    def recall(self, keys: Keys) -> Numbers:
        """Return the number stored for each key, or -1."""
        numbers = np.full(keys.size, -1, np.int64)
        found, at = self._find(keys)
        numbers[found] = _numbers(self._flat.take(at))
        return numbers

    def take(self, keys: Keys) -> tuple[Indices, Numbers]:
        """Return the indices of the keys that have a number, and these numbers, which are removed."""
        found, at = self._find(keys)
        numbers = _numbers(self._flat.take(at))
        self._flat[at] = 0
        return found, numbers

    def _find(self, keys: Keys) -> tuple[Indices, Indices]:
        """Return the indices of the keys that have a number, and the places of these numbers."""
        if not self._written:
            return np.empty(0, np.intp), np.empty(0, np.intp)
        sets, ways = self._set_of(keys), self._ways
        tags, known = _halves(self._places.take(sets, axis=0))
        at = (tags == (keys >> HALF).astype(np.uint32)[:, None]).reshape(-1).nonzero()[0]
        at = at[known[at // ways, at % ways] != 0]
        found = at // ways
        return found, sets.take(found) * ways + at % ways

    def clear(self) -> None:
        """Forget everything."""
        self._places = np.zeros((int(self._num_sets), self._ways), np.uint64)  # 0: empty
        self._flat = self._places.reshape(-1)
        self._written = False


def _halves(ghosts: Keys) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the high and the low 32 bits of ghosts: half of the word of a hash, and the number plus one."""
    halves = ghosts.view(np.uint32)
    low = int(sys.byteorder == "big")
    return halves[:, 1 - low :: 2], halves[:, low::2]


def _numbers(ghosts: Keys) -> Numbers:
    """Return the numbers of ghosts."""
    return (ghosts & LOW).astype(np.int64) - 1
