"""Stands in for vLLM's queue of free blocks: those without content first, of the others those that a policy chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .state import PolicyState


class PolicyQueue:
    """The interface of vLLM's `FreeKVCacheBlockQueue` over an eviction policy.

    Blocks without a hash hold nothing that could be hit: they are handed out first, those freed last before those never
    used, as vLLM does. Under the lru policy the order is vLLM's own.

    Args:
        blocks: Every block of the pool, by number.
        free: Those that are free, the next to be handed out first; none of them has a hash.
        state: What the policy reads and is told of.
    """

    def __init__(self, blocks: list[Any], free: list[Any], state: PolicyState) -> None:
        self._blocks = blocks
        self._state = state
        self._empty = {block.block_id: block for block in reversed(free)}  # the last is handed out next
        self._cached = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return len(self._empty) + self._cached

    def popleft(self) -> Any:
        """The next block."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """The next `n` blocks; the policy is asked for what the blocks without content do not cover."""
        empty = self._empty
        assert n <= self.num_free_blocks
        taken = [empty.popitem()[1] for _ in range(min(n, len(empty)))]
        if len(taken) < n:
            wanted = n - len(taken)
            ids = self._state.policy.victims(wanted)
            if len(ids) != wanted:
                raise RuntimeError(
                    f"{type(self._state.policy).__name__}.victims: got {len(ids)}, needs {wanted} blocks"
                )
            self._cached -= wanted
            blocks = self._blocks
            taken += [blocks[i] for i in ids.tolist()]
        return taken

    def remove(self, block: Any) -> None:
        """Takes a block out that somebody found."""
        self.discard(block)
        self._state.accessed([block])

    def discard(self, block: Any) -> None:
        """As `remove`, the policy not told."""
        if self._empty.pop(block.block_id, None) is None:
            self._cached -= 1

    def append(self, block: Any) -> None:
        """A block was given back with its content."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Blocks were given back with their content, the last of their sequence first."""
        if blocks:
            self._cached += len(blocks)
            self._state.released([block.block_id for block in reversed(blocks)])

    def prepend_n(self, blocks: list[Any]) -> None:
        """Blocks without content were given back; the first of them is the next to be handed out."""
        for block in reversed(blocks):
            self._empty[block.block_id] = block

    def forget_contents(self) -> None:
        """No block has a hash any more: all go in the order they would have gone, and the policy begins anew.

        Where the policy's order is lru's, blocks that never had content still go first.
        """
        ids = self._state.policy.victims(self._cached).tolist() if self._cached else []
        self._cached = 0
        self._empty = {i: self._blocks[i] for i in reversed(ids)} | self._empty
        self._state.clear()

    def get_all_free_blocks(self) -> list[Any]:
        """Every free block: those without content in their order, then the others by number (a policy has no order)."""
        cached = [b for b in self._blocks if b.ref_cnt == 0 and not b.is_null and b.block_id not in self._empty]
        return [*reversed(self._empty.values()), *cached]

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Refused: a policy decides when it is asked, so nobody can look ahead."""
        raise NotImplementedError("iter_blocks_after: an eviction policy has no order to walk through")
