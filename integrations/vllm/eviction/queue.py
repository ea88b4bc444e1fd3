"""Stands in for vLLM's queue of free blocks: those without content first, of the others those that a policy chooses."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from ...policy_pool import PolicyPool
from .waiting import WaitingPrefixes

AHEAD_FROM, AHEAD = 16_384, 64
"""A pool of so many blocks chooses a 64th of them ahead: their code, called once in a few steps for a few
blocks, takes ten times as long as when its instructions and arrays are in the processor's caches.

A 32nd in a pool of 4,200 blocks lost the default 1.2 % of its hits: half a request is little, five are not.
"""

ROUNDS = 8
"""How often a policy is asked for blocks of which too many are waited for, each time for twice as many."""
LEFT = 16
"""Requests that wait no more, after which it is looked at what only they waited for."""


class PolicyQueue:
    """The interface of vLLM's `FreeKVCacheBlockQueue` over an eviction policy; of `free` none may have a hash.

    Blocks without a hash hold nothing that could be hit: they are handed out first, those freed last before those never
    used, as vLLM does. Under the lru policy the order is vLLM's own. Victims chosen ahead can be hit until they are
    handed out; to the policy that is content that came back. So can those that a waiting request will find: they are
    handed out after all others.
    """

    waiting: WaitingPrefixes | None = None
    """What waiting requests will find; None: not looked at."""

    def __init__(self, blocks: list[Any], free: list[Any], state: PolicyPool) -> None:
        self._blocks = blocks
        self._state = state
        self._empty = free[::-1]  # the last is handed out next
        self._chosen: list[int] = []  # the first is handed out next
        self._kept: list[int] = []  # chosen, but waited for
        self._seen = 0, 0
        self.num_evicted = 0
        """Victims handed out."""
        self.num_returned = 0
        """Victims that were hit before."""
        self._ahead = len(blocks) // AHEAD if len(blocks) >= AHEAD_FROM else 0
        self.num_free_blocks = len(free)

    @property
    def num_kept(self) -> int:
        """Victims that stay because they are waited for."""
        return len(self._kept)

    @property
    def num_empty_blocks(self) -> int:
        """Blocks without content, which are handed out first."""
        return len(self._empty)

    def popleft(self) -> Any:
        """The next block."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """The next `n` blocks."""
        return self.take(n)[0]

    def take(self, n: int) -> tuple[list[Any], array[int]]:
        """The next `n` blocks and their numbers; the policy is asked for what those without content do not cover."""
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
        """Has `count` victims at least, so far as there are others none that is waited for."""
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
        """Sets aside what is waited for by now of blocks chosen ahead; at times the contrary, of those set aside."""
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
        """Sets those aside that are waited for."""
        free, awaited = (victims, []) if self.waiting is None else self.waiting.split(victims, self._blocks)
        self._chosen += free
        self._kept += awaited

    def remove(self, block: Any) -> None:
        """Takes out a block that was hit."""
        returned = self.discard([block])
        self._state.accessed([block.block_id], [each.block_id for each in returned])

    def discard(self, blocks: list[Any]) -> list[Any]:
        """Takes blocks out without notifying the policy; returns those that it had chosen already."""
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

    def append(self, block: Any) -> None:
        """A block was released with its content."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Blocks were released with their content, the last of their sequence first."""
        self.append_numbers(array("i", [block.block_id for block in reversed(blocks)]))

    def append_numbers(self, numbers: array[int]) -> None:
        """As `append_n`, by number and in the order of their sequence."""
        if numbers:
            self.num_free_blocks += len(numbers)
            self._state.released(numbers)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Blocks without content were released; the first of them is the next to be handed out."""
        if blocks:
            self.num_free_blocks += len(blocks)
            self._empty += blocks[::-1]
            self._state.dropped([block.block_id for block in blocks])

    def forget_contents(self) -> None:
        """No block has a hash any more: all go in the order they would have gone, and the policy begins anew."""
        chosen = self._chosen + self._kept
        waiting = self.num_free_blocks - len(self._empty) - len(chosen)
        ids = self._state.victims(waiting).tolist() if waiting else []
        self._empty = [self._blocks[i] for i in reversed(chosen + ids)] + self._empty
        self._chosen, self._kept = [], []
        self._state.clear()

    def get_all_free_blocks(self) -> list[Any]:
        """Every free block: those without content in their order, then the others by number (a policy has no order)."""
        empty = {block.block_id for block in self._empty}
        cached = [b for b in self._blocks if b.ref_cnt == 0 and not b.is_null and b.block_id not in empty]
        return [*reversed(self._empty), *cached]

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Refused: a policy decides when it is asked."""
        raise NotImplementedError("iter_blocks_after: an eviction policy has no order to walk through")
