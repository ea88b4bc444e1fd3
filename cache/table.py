"""The table from block hash to block number: open addressing over numpy, a whole run of blocks at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .hashing import Words

Ids = npt.NDArray[np.int32]
"""Block numbers."""

Places = npt.NDArray[np.int64]
"""Slots of the table."""


class HashTable:
    """Finds, inserts and removes runs of blocks by hash.

    A slot is live when the block in it points back at it, so that removal is one vector write; slots left behind are
    probed past, and swept out once half of the table has been used. Probing is double hashing from the first word.

    Args:
        words: Hash of every block `[words, num_blocks]`, owned by the pool.
    """

    def __init__(self, words: Words) -> None:
        num_blocks = words.shape[1]
        self._words = words
        self._size = max(16, 1 << (3 * num_blocks - 1).bit_length())
        self._mask = self._size - 1
        self._slots = np.full(self._size, -1, np.int32)
        self._slot_of = np.full(num_blocks + 1, -1, np.int32)
        self._slot_of[num_blocks] = -2  # what an empty slot, -1, points at: equal to no slot
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, the hashes themselves not counted."""
        return self._slots.nbytes + self._slot_of.nbytes

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Whether each block is in the table."""
        listed: npt.NDArray[np.bool_] = self._slot_of.take(ids) >= 0
        return listed

    def find(self, digests: Words) -> Ids:
        """The block of each hash of `digests` `[words, n]`, -1 where there is none."""
        return self.search(digests)[0]

    def search(self, digests: Words) -> tuple[Ids, Places]:
        """Like `find`, and the slot where each search ended, for `insert`."""
        found, ends = self._probe(digests[:1])
        hit = found >= 0
        ids = found[hit]
        for own, asked in zip(self._words[1:], digests[1:], strict=True):
            if not np.array_equal(own.take(ids), asked[hit]):
                return self._probe(digests)  # two hashes share their first 64 bits
        return found, ends

    def _start(self, key: npt.NDArray[np.uint64]) -> Places:
        places: Places = key.astype(np.int64)
        places &= self._mask
        return places

    @staticmethod
    def _step(key: npt.NDArray[np.uint64]) -> Places:
        steps: Places = ((key >> np.uint64(40)) | np.uint64(1)).astype(np.int64)
        return steps

    def _probe(self, digests: Words) -> tuple[Ids, Places]:
        """Searches by as many words as `digests` has."""
        at = self._start(digests[0])
        found: Ids = self._slots.take(at)
        left = self._mismatch(found, at, digests).nonzero()[0]
        if left.size:
            step = self._step(digests[0].take(left))
            here, asked = at.take(left), digests.take(left, axis=1)
            while left.size:
                here = (here + step) & self._mask
                blocks = self._slots.take(here)
                found[left] = blocks
                at[left] = here
                go_on = self._mismatch(blocks, here, asked).nonzero()[0]
                left, here, step, asked = left[go_on], here[go_on], step[go_on], asked.take(go_on, axis=1)
        return found, at

    def _mismatch(self, blocks: Ids, at: Places, digests: Words) -> npt.NDArray[np.bool_]:
        """Where a slot holds something, live or left behind, that is not the hash asked for."""
        index = blocks.astype(np.intp)
        differs: npt.NDArray[np.bool_] = self._slot_of.take(index, mode="wrap") != at
        for own, asked in zip(self._words, digests, strict=False):
            differs |= own.take(index, mode="wrap") != asked
        differs &= blocks >= 0
        return differs

    def insert(self, ids: Ids, ends: Places | None = None) -> None:
        """Adds blocks under their hashes, which are in the table neither before nor twice in this call.

        Args:
            ids: The blocks; the pool has written their words.
            ends: Where a search for them ended, if nothing has been inserted since.
        """
        if 2 * (self._used + ids.size) > self._size:
            self._sweep()
            ends = None
        self._place(ids, ends)

    def _place(self, ids: Ids, ends: Places | None = None) -> None:
        key = self._words[0].take(ids)
        at = self._start(key) if ends is None else ends
        step: Places | None = None
        while ids.size:
            there = self._slots.take(at)
            taken = self._slot_of.take(there) == at
            if taken.any():
                free = ~taken
                self._slots[at[free]] = ids[free]
            else:
                self._slots[at] = ids
            lost = self._slots.take(at) != ids  # taken before, or by another block of this run
            self._slot_of[ids] = np.where(lost, np.int32(-1), at)
            self._used += int(np.count_nonzero((there < 0) & ~lost))
            left = lost.nonzero()[0]
            if not left.size:
                return
            step = self._step(key.take(left)) if step is None else step[left]
            ids, at = ids[left], (at[left] + step) & self._mask

    def remove(self, ids: Ids) -> None:
        """Takes blocks out of the table; those that are not in it are left alone."""
        self._slot_of[ids] = -1

    def _sweep(self) -> None:
        live = np.flatnonzero(self._slot_of[:-1] >= 0).astype(np.int32)
        self.clear()
        self._place(live)

    def clear(self) -> None:
        """Empties the table."""
        self._slots.fill(-1)
        self._slot_of[:-1] = -1
        self._used = 0

    def check(self) -> None:
        """Asserts that every block in the table is found under its hash, once."""
        live = np.flatnonzero(self._slot_of[:-1] >= 0).astype(np.int32)
        assert np.array_equal(self._slots[self._slot_of[live]], live), "a slot and its block disagree"
        assert np.array_equal(self.find(self._words[:, live]), live), "a block is not found under its hash"
