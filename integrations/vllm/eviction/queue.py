"""The queue of free blocks for vLLM's pool: blocks without content first, then the victims of a policy."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from ...policy_pool import PolicyPool
from .waiting import WaitingPrefixes

AHEAD_FROM, AHEAD = 16_384, 64
"""A pool of at least AHEAD_FROM blocks chooses 1/AHEAD of them in advance. A policy that chooses a few blocks every few
steps runs with cold processor caches, which takes ten times as long.

In a pool of 4,200 blocks, choosing 1/32 in advance lost the default policy 1.2 % of its hits.
"""

ROUNDS = 8
"""Maximum number of times that the policy chooses victims if waiting requests will hit those chosen so far.

Each time it chooses twice as many for each block that is still needed.
"""
LEFT = 16
"""Number of requests that must leave the waiting queue before kept blocks are checked again."""


class PolicyQueue:
    """The part of vLLM's `FreeKVCacheBlockQueue` that `PolicyBlockPool` leaves in use, over an eviction policy.

    Blocks without a hash cannot be hit, so they are allocated first: those freed last, then those never used, as in
    vLLM. Under the lru policy the order is vLLM's own. A victim that was chosen in advance can still be hit until it is
    allocated. The policy is then notified that the content returned. Victims that a waiting request will hit come
    after all others.

    Args:
        blocks: All blocks of the pool.
        free: The free ones, none with a hash.
        state: The policy's view of the pool.
    """

    waiting: WaitingPrefixes | None = None
    """The hashes that waiting requests will hit. None: waiting requests are ignored."""

    def __init__(self, blocks: list[Any], free: list[Any], state: PolicyPool) -> None:
        self._blocks = blocks
        self._state = state
        self._empty = free[::-1]  # the last is allocated next
        self._chosen: list[int] = []  # the first is allocated next
        self._kept: list[int] = []  # victims that a waiting request will hit
        self._seen = 0, 0  # `joined` and `left` of `waiting` when victims were last sorted
        self.num_evicted = 0
        """The number of victims that were allocated."""
        self.num_returned = 0
        """The number of victims that were hit before they were allocated."""
        self._ahead = len(blocks) // AHEAD if len(blocks) >= AHEAD_FROM else 0
        self.num_free_blocks = len(free)

    @property
    def num_kept(self) -> int:
        """The number of victims that stay because a waiting request will hit them."""
        return len(self._kept)

    @property
    def num_empty_blocks(self) -> int:
        """The number of free blocks without content."""
        return len(self._empty)

    def take(self, n: int) -> tuple[list[Any], array[int]]:
        """Allocate the next `n` blocks; return them and their numbers."""
        empty = self._empty
        assert n <= self.num_free_blocks
        if n > len(empty) and self.waiting is not None:
            self._look_again(self.waiting)
        if n > len(empty) + len(self._chosen):
            self._choose(n - len(empty))
        left = max(0, len(empty) - n)
        taken = empty[left:]
        del empty[left:]
        taken.reverse()
        numbers, rest, blocks = array("i", [block.block_id for block in taken]), n - len(taken), self._blocks
        if rest:
            chosen = self._chosen[:rest]
            taken += [blocks[i] for i in chosen]
            numbers.extend(chosen)
            del self._chosen[:rest]
            self.num_evicted += rest
        self.num_free_blocks -= n
        return taken, numbers

    def _choose(self, count: int) -> None:
        """Choose victims until there are `count`. Victims that a waiting request will hit come last."""
        others = self.num_free_blocks - len(self._empty) - len(self._chosen) - len(self._kept)
        for doubled in range(ROUNDS):
            lacking = count - len(self._chosen)
            wanted = min((lacking << doubled) + self._ahead, others)
            if lacking <= 0 or not wanted:
                break
            self._sort_out(self._state.victims(wanted).tolist())
            others -= wanted
        lacking = max(0, count - len(self._chosen))
        self._chosen += self._kept[:lacking]
        del self._kept[:lacking]

    def _look_again(self, waiting: WaitingPrefixes) -> None:
        """Sort victims again after requests have joined the queue or, at times, after some have left it."""
        waiting.refresh()
        joined, left = self._seen
        candidates: list[int] = []
        if waiting.joined != joined:
            candidates, self._chosen = self._chosen, []
        if waiting.left - left >= LEFT:
            candidates, self._kept, left = candidates + self._kept, [], waiting.left
        self._sort_out(candidates)
        self._seen = waiting.joined, left

    def _sort_out(self, victims: list[int]) -> None:
        """Add each victim to the chosen blocks, or to the kept ones if a waiting request will hit it."""
        free, awaited = (victims, []) if self.waiting is None else self.waiting.split(victims, self._blocks)
        self._chosen += free
        self._kept += awaited

    def discard(self, blocks: list[Any]) -> list[Any]:
        """Remove blocks without notifying the policy. Return those that it had already chosen."""
        self.num_free_blocks -= len(blocks)
        if None in [block.block_hash for block in blocks]:
            gone = {id(block) for block in blocks if block.block_hash is None}
            self._empty = [block for block in self._empty if id(block) not in gone]
        if not (self._chosen or self._kept):
            return []
        found = {block.block_id for block in blocks}.intersection(self._chosen + self._kept)
        if not found:
            return []
        self._chosen = [i for i in self._chosen if i not in found]
        self._kept = [i for i in self._kept if i not in found]
        self.num_returned += len(found)
        return [block for block in blocks if block.block_id in found]

    def append_n(self, blocks: list[Any]) -> None:
        """Add blocks that were released with their content, the last of their sequence first."""
        self.append_numbers(array("i", [block.block_id for block in reversed(blocks)]))

    def append_numbers(self, numbers: array[int]) -> None:
        """Add blocks like `append_n`, by number and in the order of their sequence."""
        if numbers:
            self.num_free_blocks += len(numbers)
            self._state.released(numbers)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Add blocks that were released without content; the first of them is allocated next."""
        if blocks:
            self.num_free_blocks += len(blocks)
            self._empty += blocks[::-1]
            self._state.dropped([block.block_id for block in blocks])

    def forget_contents(self) -> None:
        """Handle the loss of all hashes: free blocks keep the order of eviction, and the policy starts over."""
        chosen = self._chosen + self._kept
        waiting = self.num_free_blocks - len(self._empty) - len(chosen)
        ids = self._state.victims(waiting).tolist() if waiting else []
        self._empty = [self._blocks[i] for i in reversed(chosen + ids)] + self._empty
        self._chosen, self._kept = [], []
        self._state.clear()

    def get_all_free_blocks(self) -> list[Any]:
        """Return every free block: those without content in their order, then the others by number."""
        empty = {block.block_id for block in self._empty}
        cached = [b for b in self._blocks if b.ref_cnt == 0 and not b.is_null and b.block_id not in empty]
        return [*reversed(self._empty), *cached]

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Raise NotImplementedError, because a policy has no order in advance."""
        raise NotImplementedError("iter_blocks_after: an eviction policy has no order to walk through")
