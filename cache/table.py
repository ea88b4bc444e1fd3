"""A hash table from block hash to block number, which handles a whole run of blocks with numpy operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .hashing import Words

Ids = npt.NDArray[np.int32]
"""Block numbers."""
Places = npt.NDArray[np.int64]
"""Slots of the table."""

# numpy's C function, without the two Python calls of `np.count_nonzero`. `any` and `all` take several times as long.
_multiarray = getattr(getattr(np, "_core", None), "multiarray", None)  # numpy 1 has no such module
count_nonzero = getattr(_multiarray, "count_nonzero", np.count_nonzero)

# Up to this many blocks are handled one by one, because a round of vector operations costs as much.
FEW = 24
# Set in a slot that an insertion had to pass. The other bits are the number of the block there.
PASSED = 1 << 30


def view(values: Any) -> Any:
    """Return a view of an array for access to single elements, in a third of numpy's time."""
    return memoryview(values)


class HashTable:
    """A table that finds, inserts and removes runs of blocks by hash.

    It uses open addressing with double hashing. A slot is live if its block points back at it, so removal is one vector
    write. Each slot remembers whether an insertion ever had to pass it. A search continues only past such slots, so it
    takes one or two rounds even after many removals. The marks are renewed when a sixteenth of the slots has one. There
    are six to twelve slots for each block; with half as many, insertion takes a third longer.

    Attributes:
        slot_of: Slot of each block; -1 for a block that is not in the table.
        numbers: All block numbers.
    """

    def __init__(self, words: Words) -> None:
        num_blocks = words.shape[0]
        self._words, self.numbers = words, np.arange(num_blocks, dtype=np.int32)
        self.numbers.flags.writeable = False
        self._size = max(16, 1 << (6 * num_blocks - 1).bit_length())
        self._mask = self._size - 1
        self._key_mask = np.uint64(self._mask)
        self._slots = np.full(self._size + 1, num_blocks, np.int32)  # no hash maps to the last slot
        self._num_passed = 0
        self.slot_of = np.full(num_blocks + 1, -1, np.int32)  # the last entry is for empty slots
        self._slots_view, self._slot_of_view = view(self._slots), view(self.slot_of)
        self._words_view, self._width = view(words.reshape(-1)), words.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held, without the hashes."""
        return self._slots.nbytes + self.slot_of.nbytes

    @property
    def listed(self) -> npt.NDArray[np.bool_]:
        """For each block of the pool, whether it is in the table."""
        return self.slot_of[:-1] >= 0

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return for each of some blocks whether it is in the table."""
        return self.slot_of.take(ids) >= 0

    def lists(self, block: int) -> bool:
        """Return whether one block is in the table."""
        return bool(self._slot_of_view[block] >= 0)

    def find(self, digests: Words) -> Ids:
        """Return the block of each hash in `digests` `[n, words]`; -1 if there is none."""
        at = self._start(digests)
        found, left = self._match(at, digests)
        if left.size:
            asked = digests.take(left, axis=0)
            at, step = at.take(left), ((asked[:, 0] >> np.uint64(40)) | np.uint64(1)).astype(np.int64)
            while left.size:
                at = (at + step) & self._mask
                found[left], go_on = self._match(at, asked)
                left, at, step, asked = left[go_on], at[go_on], step[go_on], asked.take(go_on, axis=0)
        return found

    def _start(self, digests: Words) -> Places:
        """Return the slot in which the search for each hash begins."""
        places: Places = (digests[:, 0] & self._key_mask).view(np.int64)
        return places

    def _match(self, at: Places, digests: Words) -> tuple[Ids, npt.NDArray[np.intp]]:
        """Return the live blocks at these slots with these hashes, or -1, and the rows to search further."""
        slots = self._slots.take(at)
        index = (slots & (PASSED - 1)).astype(np.intp)
        same = self.slot_of.take(index) == at
        rows = self._words.take(index, axis=0, mode="clip")
        for word in range(self._width):  # `all` over a short axis takes several times as long
            same &= rows[:, word] == digests[:, word]
        blocks: Ids = np.where(same, index, -1).astype(np.int32)
        return blocks, ((slots >= PASSED) & ~same).nonzero()[0]

    def leading(self, digests: Words, start: int = 0) -> Ids:
        """Return the blocks of the hashes from `start` on, up to the first hash that is not in the table.

        Blocks of a sequence are mostly neighbours in memory, so one is looked up and the blocks after it are compared.
        """
        parts: list[Ids] = []
        at, count = start, len(digests)
        while at < count:
            if len(parts) == FEW and at - start < 4 * FEW:  # the blocks are scattered
                found = self.find(digests[at:])
                parts.append(found[: int(np.append(found, -1).argmin())])
                break
            block = self._find_one(digests, at)
            if block < 0:
                break
            most = min(count - at, len(self._words) - block)
            length, step = 1, 256
            while length < most:
                end = min(length + step, most)
                differs = self._words[block + length : block + end] != digests[at + length : at + end]
                if count_nonzero(differs):
                    length += int(differs.argmax()) // self._width
                    break
                length, step = end, 16 * step
            parts.append(self.numbers[block : block + length])
            at += length
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else self.numbers[:0]

    def _find_one(self, digests: Words, row: int) -> int:
        """Return the block of one hash; -1 if there is none."""
        slots, slot_of, mask, key = self._slots_view, self._slot_of_view, self._mask, digests.item(row, 0)
        at = key & mask
        while True:
            slot = slots[at]
            block: int = slot & (PASSED - 1)
            same = slot_of[block] == at and self._words_view[block * self._width] == key
            if same and self._words[block].tobytes() == digests[row].tobytes():
                return block
            if slot < PASSED:
                return -1
            at = (at + ((key >> 40) | 1)) & mask

    def put(self, ids: Ids, digests: Words) -> Ids | None:
        """Add blocks under their hash words. None of the blocks may be in the table yet, and their hashes must differ.

        A block whose hash another block already has is not added.

        Returns:
            For each block, the other block with its hash, or -1 if there is none. None if all are -1.
        """
        if self._num_passed > self._size // 16:
            self.renew(self.listed.nonzero()[0].astype(np.int32))
        if ids.size <= FEW:
            return self._put_each(digests, range(ids.size), ids.tolist(), digests[:, 0].tolist())
        at = self._start(digests)
        places = self._slots.take(at)
        taken = places >= PASSED
        places &= PASSED - 1
        taken |= self.slot_of.take(places) == at
        at[taken] = self._size  # the last slot, which no search reads, so that one operation writes all
        self._slots[at] = ids
        self._slots_view[self._size] = -1
        self.slot_of[ids.astype(np.intp)] = at
        # These slots are taken, or another block of this run got them. In a full pool, this is a tenth of the blocks.
        rest = (self._slots.take(at) != ids).nonzero()[0]
        return self._put_each(digests, rest.tolist(), ids.take(rest).tolist(), digests[rest, 0].tolist())

    def _put_each(self, digests: Words, rows: Sequence[int], ids: list[int], keys: list[int]) -> Ids | None:
        """Add the blocks in some rows one by one, with their numbers and the first words of their hashes; see `put`."""
        slots, slot_of, mask = self._slots_view, self._slot_of_view, self._mask
        first_word, width = self._words_view, self._width
        duplicates: dict[int, int] = {}
        for row, block, key in zip(rows, ids, keys, strict=True):
            at, step, free = key & mask, (key >> 40) | 1, -1
            slot = slots[at]
            if slot < PASSED and slot_of[slot] != at:  # the usual case, in half the time
                slots[at], slot_of[block] = block, at
                continue
            while True:
                other = slot & (PASSED - 1)
                if slot_of[other] != at:
                    free = at if free < 0 else free
                elif first_word[other * width] == key and self._words[other].tobytes() == digests[row].tobytes():
                    duplicates[row], slot_of[block] = other, -1
                    break
                elif slot < PASSED and free < 0:  # without a free slot, the search goes on
                    self._num_passed += 1
                    slots[at] = slot = slot | PASSED
                if slot < PASSED:
                    slots[free], slot_of[block] = block | slots[free] & PASSED, free
                    break
                at = (at + step) & mask
                slot = slots[at]
        if not duplicates:
            return None
        found = np.full(len(digests), -1, np.int32)
        found[list(duplicates)] = list(duplicates.values())
        return found

    def remove(self, ids: Ids | slice | npt.NDArray[np.intp]) -> None:
        """Remove blocks from the table. Blocks that are not in it are ignored."""
        self.slot_of[ids] = -1

    def renew(self, live: Ids) -> None:
        """Replace the content of the table by these blocks under their hash words."""
        self._slots.fill(self._words.shape[0])
        self._num_passed = 0
        self.slot_of.fill(-1)
        self.put(live, self._words.take(live, axis=0))

    def check(self) -> None:
        """Assert that every block in the table is found under its hash, once."""
        live = np.flatnonzero(self.listed).astype(np.int32)
        assert np.array_equal(self._slots[self.slot_of[live]] & (PASSED - 1), live), "a slot and its block disagree"
        assert np.array_equal(self.find(self._words[live]), live), "a block is not found under its hash"
