"""The table from block hash to block number: open addressing over numpy, a whole run of blocks at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .hashing import Words

Ids = npt.NDArray[np.int32]
"""Block numbers."""

Places = npt.NDArray[np.int64]
"""Slots of the table."""

count_nonzero = np._core.multiarray.count_nonzero if hasattr(np, "_core") else np.count_nonzero
"""Without the two Python calls of the public one; `any` and `all` as methods take several times as long."""

FEW = 24
"""Up to so many blocks are handled one by one: a round of vector operations costs as much."""

PASSED = 1 << 30
"""Set in a slot that an insertion had to pass; the rest of it is the number of the block there."""


class HashTable:
    """Finds, inserts and removes runs of blocks by hash.

    Open addressing with double hashing. A slot is live when the block in it points back at it, so removal is one
    vector write. Each slot remembers whether an insertion ever had to pass it: a search goes on only behind such
    slots, which keeps it at one or two rounds however much was removed; the marks are renewed when a sixteenth is set.
    Six to twelve slots a block: a quarter less time to insert than with half as many.

    Args:
        words: Hash of every block `[num_blocks, words]`, owned by the pool.

    Attributes:
        slot_of: Per block, its slot, -1 for one that is not in the table.
    """

    def __init__(self, words: Words) -> None:
        num_blocks = words.shape[0]
        self._words = words
        self._size = max(16, 1 << (6 * num_blocks - 1).bit_length())
        self._mask = self._size - 1
        self._slots = np.full(self._size + 1, num_blocks, np.int32)  # the last is no hash's own
        self._num_passed = 0
        self.slot_of = np.full(num_blocks + 1, -1, np.int32)  # the last is that of empty slots: none
        # Reading one element through these takes a third of the time that numpy takes.
        self._slots_view, self._slot_of_view = _view(self._slots), _view(self.slot_of)
        self._words_view = _view(words.reshape(-1))
        self._width = words.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held, the hashes themselves not counted."""
        return self._slots.nbytes + self.slot_of.nbytes

    @property
    def listed(self) -> npt.NDArray[np.bool_]:
        """Per block, whether it is in the table."""
        listed: npt.NDArray[np.bool_] = self.slot_of[:-1] >= 0
        return listed

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Whether each block is in the table."""
        listed: npt.NDArray[np.bool_] = self.slot_of.take(ids) >= 0
        return listed

    def lists(self, block: int) -> bool:
        """Whether one block is in the table."""
        return bool(self._slot_of_view[block] >= 0)

    def has(self, digest: npt.NDArray[np.uint64]) -> bool:
        """Whether a block with this hash is in the table."""
        return self._find_one(digest.item(0), digest) >= 0

    def find(self, digests: Words) -> Ids:
        """The block of each hash of `digests` `[n, words]`, -1 where there is none."""
        return self.search(digests)[0]

    def search(self, digests: Words) -> tuple[Ids, Places]:
        """Like `find`, and the slot where each search ended."""
        found, ends, rows = self._probe(digests, exact=False)
        hit = found >= 0
        if count_nonzero(hit) and not (rows[hit] == digests[hit]).all():  # two hashes share their first 64 bits
            found, ends, _ = self._probe(digests, exact=True)
        return found, ends

    def confirm(self, ids: Ids, digests: Words) -> int:
        """How many blocks, from the first on, are in the table under the hash beside them."""
        listed = self.slot_of.take(ids) >= 0
        same = self._words.take(ids, axis=0) == digests
        if count_nonzero(listed) == ids.size and count_nonzero(same) == same.size:
            return ids.size
        return int((listed & same.all(axis=1)).argmin())

    def _start(self, key: npt.NDArray[np.uint64]) -> Places:
        places: Places = key.astype(np.int64)
        places &= self._mask
        return places

    @staticmethod
    def _step(key: npt.NDArray[np.uint64]) -> Places:
        steps: Places = ((key >> np.uint64(40)) | np.uint64(1)).astype(np.int64)
        return steps

    def _probe(self, digests: Words, exact: bool) -> tuple[Ids, Places, Words]:
        """Blocks, slots where searches ended, and the hashes seen there; by the first word unless `exact`."""
        at = self._start(digests[:, 0])
        found, rows, left = self._match(at, digests, exact)
        if left.size:
            asked = digests.take(left, axis=0)
            here, step = at.take(left), self._step(asked[:, 0])
            while left.size:
                here = (here + step) & self._mask
                found[left], rows[left], go_on = self._match(here, asked, exact)
                at[left] = here
                left, here, step, asked = left[go_on], here[go_on], step[go_on], asked.take(go_on, axis=0)
        return found, at, rows

    def _match(self, at: Places, digests: Words, exact: bool) -> tuple[Ids, Words, npt.NDArray[np.intp]]:
        """The live blocks at these slots that have these hashes, -1 for others; the hashes there; who must go on."""
        slots = self._slots.take(at)
        index = (slots & (PASSED - 1)).astype(np.intp)
        rows = self._words.take(index, axis=0, mode="clip")
        same = (rows == digests).all(axis=1) if exact else rows[:, 0] == digests[:, 0]
        same &= self.slot_of.take(index) == at
        blocks: Ids = np.where(same, index, -1).astype(np.int32)
        return blocks, rows, ((slots >= PASSED) & ~same).nonzero()[0]

    def leading(self, digests: Words) -> Ids:
        """The blocks of the first hashes, up to the first hash that is not there."""
        few = digests[:4]
        blocks: list[int] = []
        for i, key in enumerate(few[:, 0].tolist()):
            block = self._find_one(key, few[i])
            if block < 0:
                return np.array(blocks, np.int32)
            blocks.append(block)
        parts, at, width = [np.array(blocks, np.int32)], len(blocks), 64
        while at < len(digests):
            found = self.find(digests[at : at + width])
            missing = found < 0
            first = int(missing.argmax())
            if missing[first]:
                parts.append(found[:first])
                break
            parts.append(found)
            at, width = at + width, 8 * width
        return np.concatenate(parts)

    def _find_one(self, key: int, digest: npt.NDArray[np.uint64]) -> int:
        """The block of one hash, whose first word is `key`; -1 for none."""
        slots, slot_of, first_word, width = self._slots_view, self._slot_of_view, self._words_view, self._width
        at = key & self._mask
        while True:
            slot = slots[at]
            block: int = slot & (PASSED - 1)
            if slot_of[block] == at and first_word[block * width] == key and np.array_equal(self._words[block], digest):
                return block
            if slot < PASSED:
                return -1
            at = (at + ((key >> 40) | 1)) & self._mask

    def put(self, ids: Ids, digests: Words) -> Ids:
        """Adds blocks under their words, except those whose hash is there already.

        Args:
            ids: Blocks that are not in the table, with different hashes.
            digests: Their words.

        Returns:
            For each, -1, or the block that has its hash.
        """
        if self._num_passed > self._size // 16:
            self._renew()
        if ids.size <= FEW:
            return self._put_few(ids, digests)
        at = self._start(digests[:, 0])
        slots = self._slots.take(at)
        crowded = slots >= PASSED
        slots &= PASSED - 1
        crowded |= self.slot_of.take(slots) == at
        at[crowded] = self._size  # nowhere, so that the others can be written in one go
        self._slots[at] = ids
        crowded |= self._slots.take(at) != ids  # another block of this run took the place
        rest = crowded.nonzero()[0]
        index = ids.astype(np.intp)
        self.slot_of[index] = at
        self.slot_of[index.take(rest)] = -1
        duplicates = np.empty(ids.size, np.int32)
        duplicates.fill(-1)
        if rest.size:
            put = self._put_few if rest.size <= 4 * FEW else self._put_many
            duplicates[rest] = put(ids.take(rest), digests.take(rest, axis=0))
        return duplicates

    def _put_many(self, ids: Ids, digests: Words) -> Ids:
        found, ends = self.search(digests)
        duplicates = found >= 0
        if count_nonzero(duplicates):
            new = ~duplicates
            self._place(ids[new], ends[new], digests[new, 0])
        else:
            self._place(ids, ends, digests[:, 0])
        return found

    def _put_few(self, ids: Ids, digests: Words) -> Ids:
        slots, slot_of, mask = self._slots_view, self._slot_of_view, self._mask
        first_word, width = self._words_view, self._width
        duplicates: dict[int, int] = {}
        for i, (block, key) in enumerate(zip(ids.tolist(), digests[:, 0].tolist(), strict=True)):
            at = key & mask
            slot = slots[at]
            if slot >= PASSED or slot_of[slot] == at:
                step, free = (key >> 40) | 1, -1
                while True:
                    other = slot & (PASSED - 1)
                    if slot_of[other] != at:
                        free = at if free < 0 else free
                    elif first_word[other * width] == key and np.array_equal(self._words[other], digests[i]):
                        duplicates[i] = other
                        break
                    if slot < PASSED:
                        break
                    at = (at + step) & mask
                    slot = slots[at]
                if i in duplicates:
                    continue
                while free < 0:  # every slot of the search is live: it goes on behind its end
                    if slot < PASSED:
                        self._num_passed += 1
                        slots[at] = slot | PASSED
                    at = (at + step) & mask
                    slot = slots[at]
                    if slot_of[slot & (PASSED - 1)] != at:
                        free = at
                at = free
            slots[at] = block | slots[at] & PASSED
            slot_of[block] = at
        found = np.full(ids.size, -1, np.int32)
        if duplicates:
            found[list(duplicates)] = list(duplicates.values())
        return found

    def _place(self, ids: Ids, at: Places, key: npt.NDArray[np.uint64]) -> None:
        """Puts blocks into the first slots from `at` on that are not live."""
        step: Places | None = None
        while ids.size:
            slots = self._slots.take(at)
            free = self.slot_of.take(slots & (PASSED - 1)) != at
            self._slots[at[free]] = (ids | slots & PASSED)[free]
            slots = self._slots.take(at)
            lost = slots & (PASSED - 1) != ids  # taken before, or by another block of this run
            left = lost.nonzero()[0]
            if not left.size:
                self.slot_of[ids] = at
                return
            kept = ~lost
            self.slot_of[ids[kept]] = at[kept]
            ids, at, slots = ids[left], at[left], slots[left]
            self._num_passed += at.size - int(np.count_nonzero(slots & PASSED))
            self._slots[at] = slots | PASSED
            step = self._step(key.take(left)) if step is None else step[left]
            at = (at + step) & self._mask

    def remove(self, ids: Ids | slice | npt.NDArray[np.intp]) -> None:
        """Takes blocks out of the table; those that are not in it are left alone."""
        self.slot_of[ids] = -1

    def _renew(self) -> None:
        live = np.flatnonzero(self.listed).astype(np.int32)
        self.clear()
        key = self._words[live, 0]
        self._place(live, self._start(key), key)

    def clear(self) -> None:
        """Empties the table."""
        self._slots.fill(self._words.shape[0])
        self._num_passed = 0
        self.slot_of.fill(-1)

    def check(self) -> None:
        """Asserts that every block in the table is found under its hash, once."""
        live = np.flatnonzero(self.listed).astype(np.int32)
        assert np.array_equal(self._slots[self.slot_of[live]] & (PASSED - 1), live), "a slot and its block disagree"
        assert np.array_equal(self.find(self._words[live]), live), "a block is not found under its hash"


def _view(values: Any) -> Any:
    return memoryview(values)
