"""Flags that show which slots hold a row of a named tensor, for caches that follow the blocks of a manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..pool import BlockPool
from ..runs import Slots

Mask = npt.NDArray[np.bool_]


def check_blocks(
    name: str,
    blocks: Iterable[object] | Slots,
    num_blocks: int,
    least: int = -1,
    row: tuple[int, ...] = (),
    noun: str = "numbers",
) -> npt.NDArray[np.integer]:
    """Return block numbers, `[n, *row]`, as an array, after a check of their type, range and shape.

    Raises:
        TypeError: They are not integers.
        ValueError: A number is out of range, or the shape is wrong.
    """
    is_whole = isinstance(blocks, np.ndarray | Sequence) or not isinstance(blocks, Iterable)
    index = np.asarray(blocks if is_whole else list(blocks))
    if blocks is None or (index.size and index.dtype.kind not in "iu"):
        raise TypeError(f"{name}: got {blocks if blocks is None else index.dtype}, needs integers")
    if index.size and not least <= int(index.min()) <= int(index.max()) < num_blocks:
        got = f"{noun} from {index.min()} to {index.max()}"
        raise ValueError(f"{name}: got {got}, needs {least} to {num_blocks - 1}")
    if index.size and (not index.ndim or index.shape[1:] != row):
        raise ValueError(f"{name}: got shape {list(index.shape)}, needs [{', '.join(['n', *map(str, row)])}]")
    return index


class ValidRows:
    """A flag for each named tensor and slot: whether the slot holds a row of the tensor.

    A block's flags no longer count once the block is allocated again. The pool reports this, and also slots of a block
    in use that get other tokens. Without a pool, a block counts as allocated again when its first slot is written.
    """

    def __init__(self, num_blocks: int, block_size: int, pool: BlockPool | None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pool = pool
        self._bits: dict[str, Mask] = {}
        self._seen = np.full(num_blocks, -1, np.int64)  # taken_at of each block when its rows were written
        # For each target, a copy that the manager has planned and that was not made yet: the target's `taken_at` (if it
        # has changed, the copy is no longer planned), its first slot that is not copied, the source (-1: host memory),
        # and the flags of the source, because another request may write to it before the copy.
        self._copies: dict[int, tuple[int, int, int, dict[str, Mask]]] = {}
        if pool is not None:
            pool.watchers.add(self)

    def add(self, name: str) -> None:
        """Add the name of a tensor that has no rows yet."""
        self._bits[name] = np.zeros(self.num_blocks * self.block_size, np.bool_)

    def drop(self, name: str) -> None:
        """Remove a name."""
        del self._bits[name]

    def _current(self, blocks: npt.NDArray[np.integer]) -> Mask | bool:
        """Return for each block whether its flags are about its current content."""
        return self._pool is None or self._seen[blocks] == self._pool.taken_at[blocks]

    def clear(self, slots: Slots) -> None:
        """Clear the flags of slots (none negative) before a write, and of whole blocks that were allocated again."""
        if self._pool is not None and slots.size:
            blocks = slots // self.block_size
            blocks = np.concatenate((blocks[:1], blocks[1:][blocks[1:] != blocks[:-1]]))
            changed = blocks[~np.asarray(self._current(blocks))]
            if changed.size:
                self.forget(changed)
                self._seen[changed] = self._pool.taken_at[changed]
        elif slots.size:
            self.forget(slots[slots % self.block_size == 0] // self.block_size)
        for bits in self._bits.values():
            bits[slots] = False

    def mark(self, names: Iterable[str], slots: Slots) -> None:
        """Set the flags of slots (none negative) that were cleared and then written."""
        for name in names:
            self._bits[name][slots] = True

    def holds(self, names: Iterable[str], slots: Slots) -> bool:
        """Return whether every one of the slots (none negative) holds a row of every name."""
        current = bool(np.all(self._current(slots // self.block_size)))
        return current and all(self._bits[name][slots].all() for name in names)

    def forget(self, blocks: Iterable[int] | Slots) -> None:
        """Clear all flags of blocks. Entries of -1 are ignored.

        Raises:
            TypeError: They are not integers.
            ValueError: A number is out of range.
        """
        index = check_blocks("block_ids", blocks, self.num_blocks)
        index = index[index >= 0].astype(np.intp)
        for bits in self._bits.values():
            bits.reshape(self.num_blocks, self.block_size)[index] = False

    def refill(self, block: int, first: int, source: int) -> None:
        """Record that the slots of a block from `first` on get new contents. The pool calls this.

        If the block was allocated again, a copy from `source` (-1: from host memory) fills the slots before `first`.
        """
        for bits in self._bits.values():
            bits[block * self.block_size + first : (block + 1) * self.block_size] = False
        assert self._pool is not None
        taken = int(self._pool.taken_at[block])
        if self._seen[block] != taken:
            self._copies[block] = taken, first, source, self.bits_of(source) if source >= 0 else {}

    def bits_of(self, block: int) -> dict[str, Mask]:
        """Return for each name which slots of a block hold a row."""
        return self.there(self._bits, np.array([block]))

    def loaded(self, block: int, bits: dict[str, Mask], source: int = -1) -> None:
        """Set which slots of a block hold a row, by name, after a copy from block `source` (-1: from host memory)."""
        count = self.block_size
        taken, first, planned_source, planned_bits = self._copies.pop(block, (-1, 0, 0, {}))
        if self._pool is not None and taken == self._pool.taken_at[block]:
            count = first
            if planned_source == source:
                bits = {name: mine | planned_bits.get(name, False) for name, mine in bits.items()}
        slots = block * self.block_size + np.arange(self.block_size)
        self.clear(slots)
        for name in bits.keys() & self._bits.keys():
            self._bits[name][slots[:count]] = bits[name][:count]

    def there(self, names: Iterable[str], blocks: npt.NDArray[np.integer], count: int | None = None) -> dict[str, Mask]:
        """Return for each name which slots of a block table's first `count` tokens hold a row. Holes hold none."""
        present = ((blocks >= 0) & self._current(blocks))[:, None]
        there = {}
        for name in names:
            bits = self._bits[name].reshape(self.num_blocks, self.block_size)[blocks]
            bits &= present
            there[name] = bits.reshape(-1)[:count]
        return there
