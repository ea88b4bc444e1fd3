"""The table from block hash to block number: open addressing over numpy, a whole run of blocks at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .hashing import Words

Ids = npt.NDArray[np.int32]
"""Block numbers."""


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
        self._mask = np.uint64(self._size - 1)
        self._slots = np.full(self._size, -1, np.int32)
        self._slot_of = np.full(num_blocks, -1, np.int32)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, the hashes themselves not counted."""
        return self._slots.nbytes + self._slot_of.nbytes

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Whether each block is in the table."""
        return self._slot_of[ids] >= 0

    def find(self, digests: Words) -> Ids:
        """The block of each hash of `digests` `[words, n]`, -1 where there is none."""
        found = self._probe(digests, self._words[:1])
        hit = found >= 0
        for own, asked in zip(self._words[1:], digests[1:], strict=True):
            if not np.array_equal(own[found[hit]], asked[hit]):
                return self._probe(digests, self._words)  # two hashes share their first 64 bits
        return found

    def _probe(self, digests: Words, words: Words) -> Ids:
        """Blocks whose first `len(words)` words match."""
        key = digests[0]
        at = (key & self._mask).astype(np.int64)
        found: Ids = self._slots[at]
        open_ = np.flatnonzero(self._mismatch(found, at, digests, words))
        if open_.size:
            step = ((key >> np.uint64(40)) | np.uint64(1)).astype(np.int64)
            while open_.size:
                at[open_] = (at[open_] + step[open_]) & (self._size - 1)
                here = at[open_]
                blocks = self._slots[here]
                found[open_] = blocks
                open_ = open_[self._mismatch(blocks, here, digests[:, open_], words)]
        return found

    def _mismatch(self, blocks: Ids, at: npt.NDArray[np.int64], digests: Words, words: Words) -> npt.NDArray[np.bool_]:
        """Where a slot holds something, live or left behind, that is not the hash asked for."""
        differs: npt.NDArray[np.bool_] = self._slot_of[blocks] != at
        for own, asked in zip(words, digests, strict=False):
            differs |= own[blocks] != asked
        differs &= blocks >= 0
        return differs

    def insert(self, ids: Ids) -> None:
        """Adds blocks under their hashes, which are in the table neither before nor twice in this call."""
        if 2 * (self._used + ids.size) > self._size:
            self._sweep()
        self._place(ids, self._words[0, ids])

    def _place(self, ids: Ids, key: npt.NDArray[np.uint64]) -> None:
        at = (key & self._mask).astype(np.int64)
        step = ((key >> np.uint64(40)) | np.uint64(1)).astype(np.int64)
        while ids.size:
            there = self._slots[at]
            unused = there < 0
            vacant = unused | (self._slot_of[there] != at)
            self._slots[at[vacant]] = ids[vacant]
            won = vacant & (self._slots[at] == ids)
            self._slot_of[ids[won]] = at[won]
            self._used += int(np.count_nonzero(won & unused))
            lost = ~won
            ids, step = ids[lost], step[lost]
            at = (at[lost] + step) & (self._size - 1)

    def remove(self, ids: Ids) -> None:
        """Takes blocks out of the table; those that are not in it are left alone."""
        self._slot_of[ids] = -1

    def _sweep(self) -> None:
        live = np.flatnonzero(self._slot_of >= 0).astype(np.int32)
        self.clear()
        self._place(live, self._words[0, live])

    def clear(self) -> None:
        """Empties the table."""
        self._slots.fill(-1)
        self._slot_of.fill(-1)
        self._used = 0

    def check(self) -> None:
        """Asserts that every block in the table is found under its hash, once."""
        live = np.flatnonzero(self._slot_of >= 0).astype(np.int32)
        assert np.array_equal(self._slots[self._slot_of[live]], live), "a slot and its block disagree"
        assert np.array_equal(self.find(self._words[:, live]), live), "a block is not found under its hash"
