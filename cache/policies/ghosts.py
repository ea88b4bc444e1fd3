"""Bounded memories of evicted blocks."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..table import count_nonzero

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.int32]
Numbers = npt.NDArray[Any]
HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


class Ghosts:
    """A memory of one number for each recently evicted block, found by the first word of its hash.

    It is a direct-mapped table of 8 bytes an entry: a newer ghost overwrites an older one. Two blocks are confused with
    a probability of 2**-32, which only costs a wrong guess.

    Args:
        capacity: Number of entries. After that many ghosts, about a third have been overwritten.

    Examples:
        >>> from pc.cache.policies import Ghosts
        >>> ghosts, keys = Ghosts(capacity=64), np.array([1 << 40, 2 << 40], np.uint64)
        >>> ghosts.remember(keys, np.array([7, 8], np.int32))
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

    def remember(self, keys: Keys, values: Values) -> None:
        """Store a number of at least 0 for each key."""
        slots = self._slots(keys)
        self._tags[slots] = (keys >> HALF).astype(np.uint32)
        self._values[slots] = values

    def recall(self, keys: Keys) -> Values:
        """Return the number stored for each key, or -1."""
        slots = self._slots(keys)
        values: Values = self._values.take(slots)
        values[self._tags.take(slots) != (keys >> HALF).astype(np.uint32)] = -1
        return values

    def clear(self) -> None:
        """Forget everything."""
        self._values.fill(-1)


WAYS = 8
"""Number of places in which the ghost of a block may be stored. The ghost of the oldest request is overwritten.

With one place, random ghosts are lost, and a prefix with holes is not recognized. Then hits on Mooncake's synthetic
trace fall from 1.26 to 1.05 times those of lru.
"""
SERIAL_BITS = 28


class GhostRecord(NamedTuple):
    """Facts about evicted blocks."""

    serial: Numbers  # serial of the request that used it last, int64
    uses: Numbers  # number of uses, at most 5
    tail: Numbers  # 1 if it was that request's last block, else 0


def _halves(places: Keys) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the high and the low 32 bits of places: the bits of the hash, and the other fields."""
    halves = places.view(np.uint32)
    low = int(sys.byteorder == "big")
    return halves[:, 1 - low :: 2], halves[:, low::2]


class RequestGhosts:
    """A memory of each recently evicted block: the request that used it last, and its number of uses.

    Entries are found by the first word of a block's hash.

    Each place takes 8 bytes: half of this word, then serial, uses and tail (`GhostRecord`). Two blocks are confused
    with a probability of 2**-29 in each lookup, which only costs a wrong guess.
    """

    def __init__(self, capacity: int) -> None:
        sets = -(-capacity // WAYS)
        self._sets = np.uint64(sets)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held; 0 until the first call of `expect` or `remember`, because untouched memory takes no room."""
        return self._places.nbytes if self._written else 0

    def expect(self) -> None:
        """Announce that ghosts will be stored: from now on `nbytes` counts the memory, and `recall` searches it."""
        self._written = True

    def _set_of(self, keys: Keys) -> npt.NDArray[np.intp]:
        rows: npt.NDArray[np.intp] = ((keys & LOW) * self._sets >> HALF).astype(np.intp)
        return rows

    def remember(self, keys: Keys, records: GhostRecord, now: int) -> GhostRecord:
        """Store ghosts of evicted blocks; return the ghosts that they overwrite. `now` is the current serial."""
        if not keys.size:
            return records
        self.expect()
        rows = self._set_of(keys)
        value = (records.serial << 4 | records.uses << 1 | records.tail).astype(np.uint64) & LOW
        value |= keys & ~LOW
        tags, known = _halves(self._places.take(rows, axis=0))
        age = np.uint32(now << 4 & 0xFFFFFFFF | 15) - known
        age >>= np.uint32(4)
        empty = known == 0
        np.copyto(age, np.uint32(1 << SERIAL_BITS), where=empty)
        same = tags == (keys >> HALF).astype(np.uint32)[:, None]
        if count_nonzero(same):
            age[same & ~empty] = 2 << SERIAL_BITS
        at = rows * WAYS + age.argmax(axis=1)
        old = self._flat.take(at)
        self._flat[at] = value
        stayed = self._flat.take(at) == value
        lost = self._read(old[(old != 0) & stayed], now)
        if count_nonzero(stayed) == stayed.size:
            return lost
        rest = ~stayed  # several of these blocks have the same place
        again = self.remember(keys[rest], GhostRecord(*(part[rest] for part in records)), now)
        return GhostRecord(*(np.concatenate(parts) for parts in zip(lost, again, strict=True)))

    def recall(self, keys: Keys, now: int) -> tuple[Numbers, GhostRecord]:
        """Find the ghosts of newly filled blocks, and remove them. `now` is the current serial.

        Returns:
            The indices of the keys that have ghosts, and these ghosts.
        """
        if not self._written:
            return np.empty(0, np.intp), GhostRecord(*(np.empty(0, np.int64) for _ in range(3)))
        rows = self._set_of(keys)
        tags, known = _halves(self._places.take(rows, axis=0))
        at = (tags == (keys >> HALF).astype(np.uint32)[:, None]).reshape(-1).nonzero()[0]
        if at.size:
            at = at[known[at // WAYS, at % WAYS] != 0]
        found = at // WAYS
        at = rows.take(found) * WAYS + at % WAYS
        records = self._read(self._flat.take(at), now)
        self._flat[at] = 0
        return found, records

    @staticmethod
    def _read(places: Numbers, now: int) -> GhostRecord:
        """Decode places as `remember` writes them. They have the low bits of a serial; `now` gives the others."""
        value = (places & LOW).astype(np.int64)
        age = (now - (value >> 4)) & ((1 << SERIAL_BITS) - 1)
        return GhostRecord(now - age, value >> 1 & 7, value & 1)

    def clear(self) -> None:
        """Forget everything."""
        self._places = np.zeros((int(self._sets), WAYS), np.uint64)  # 0: empty
        self._flat = self._places.reshape(-1)
        self._written = False
