"""vLLM's block pool with an eviction policy in place of its queue.

In vLLM's own pool, each block takes several calls, which take a third of the time of a step that allocates and evicts.
Here one loop handles many blocks. vLLM's own methods run if KV events or metrics are on, and for unusual blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from ....cache.policies import EvictionPolicy, make_policy
from ...policy_pool import PolicyPool
from ..api import (
    BlockPool,
    block_hash,
    call_reuse_watchers,
    drop_hashes,
    give_hashes,
    give_key,
    has_own_table,
    packed_blocks_stored,
)
from .queue import PolicyQueue


class PolicyBlockPool(BlockPool):
    """A `BlockPool` that notifies a policy of what vLLM's queue never sees: hits on referenced blocks, and hashes.

    `install_policy` turns vLLM's pool into one, in place, since the scheduler and its managers hold that object.
    """

    policy_state: PolicyPool
    has_vllms_table: bool
    """Whether the pool was vLLM's own class, whose table of hashes `drop_hashes` writes to."""
    fresh_numbers: list[int] | None = None
    """Blocks allocated since the scheduler last read this list; None if the scheduler does not read it."""
    contents: Any = None
    """The `Contents` that index the text of blocks; None until a request asks for moved text."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Reference the cached blocks that a request found."""
        found = [block for block in blocks if not block.is_null]
        returned = self.free_block_queue.discard([block for block in found if block.ref_cnt == 0])
        for block in found:
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)
        if found:
            self.policy_state.accessed(numbers_of(found), numbers_of(returned))

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Allocate blocks: those without content first, then the policy's victims.

        Raises:
            ValueError: There are fewer free blocks.
            RuntimeError: The policy chose a block that it may not choose.
        """
        queue: PolicyQueue = self.free_block_queue
        if num_blocks > queue.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        empty = queue.num_empty_blocks
        taken, numbers = queue.take(num_blocks)
        for block in taken:
            block.ref_cnt = 1
        call_reuse_watchers(self, taken)
        if self.enable_caching:
            drop_hashes(self, taken if self.metrics_collector else taken[empty:])
        if self.metrics_collector:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        self.policy_state.took(numbers)
        if self.fresh_numbers is not None:
            self.fresh_numbers += numbers
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Release a request's blocks, the last of its sequence first."""
        shared: list[int] = []
        empty: list[Any] = []
        others: list[Any] = []
        cached = array("i")
        for block in ordered_blocks:
            if block.is_null or (block.pool is not self and block.pool is not None):
                others.append(block)
                continue
            block.ref_cnt = held = block.ref_cnt - 1
            if held:
                shared.append(block.block_id)
            elif block_hash(block) is None or not self.enable_caching:
                empty.append(block)
            else:
                cached.append(block.block_id)
        self.policy_state.dropped(shared)
        self.free_block_queue.prepend_n(empty)
        self.free_block_queue.append_numbers(cached[::-1])
        if others:
            super().free_blocks(others)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Any) -> None:
        """Release blocks like `free_blocks`, although a connector may read them until they are allocated again."""
        released = list(blocks)
        self.policy_state.dropped([block.block_id for block in released if block.ref_cnt > 1])
        super().unpin_blocks(released, on_reuse)

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Give full blocks of a request their hashes."""
        if num_cached_blocks >= num_full_blocks:
            return
        full = blocks[num_cached_blocks:num_full_blocks]
        keys: list[bytes] | None = None
        left = [(num_cached_blocks, num_full_blocks)]
        if block_size == self.hash_block_size and not args and not any(kwargs.values()):
            keys, left = give_hashes(self, request, full, num_cached_blocks, kv_cache_group_id)
        for first, last in left:
            super().cache_full_blocks(request, blocks, first, last, block_size, kv_cache_group_id, *args, **kwargs)
        self._completed(full, num_cached_blocks, None if left else keys)
        if self.contents is not None:
            self.contents.published(request, blocks, num_cached_blocks, num_full_blocks)

    def cache_partial_block(
        self,
        request: Any,
        block: Any,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Give a hash to a partly filled block, perhaps in place of an earlier hash."""
        had = block.block_hash
        named = super().cache_partial_block(request, block, num_tokens, kv_cache_group_id, block_size, *args, **kwargs)
        if named is not None and block.block_hash != had:
            self._completed([block], (num_tokens - 1) // block_size)
            self.policy_state.flush()  # the block may get the hash of a full one next
        return named

    def cache_packed_blocks(self, request: Any, blocks: list[Any], keys: list[bytes]) -> None:
        """Give the packed blocks of a compressed text their keys, made of the text from which they were packed."""
        for block, key in zip(blocks, keys, strict=True):
            give_key(self, key, block, self.hash_block_size)
        self._completed(blocks, 0, keys)
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(packed_blocks_stored(self, request, keys))

    def move_block_hashes(self, src_block: Any, dst_block: Any) -> None:
        """Move the hashes of a block to its copy."""
        self.policy_state.flush()
        super().move_block_hashes(src_block, dst_block)
        length = int(self.policy_state.prefix_length[src_block.block_id])
        if src_block.block_hash is None:
            self.policy_state.lost([src_block.block_id])
        self._completed([dst_block], length - 1)

    def _completed(self, blocks: list[Any], before: int, keys: list[bytes] | None = None) -> None:
        """Notify the policy of blocks that got hashes.

        Args:
            blocks: Consecutive blocks of a sequence, of which some may have no hash.
            before: The number of blocks of the sequence before them.
            keys: The hashes of `blocks`; None if some blocks may have no hash.
        """
        if self.policy_state.is_lru:
            return
        places: Sequence[int] = range(before + 1, before + 1 + len(blocks))
        if keys is None:
            hashes = map(block_hash, blocks)
            named = [(place, b, key) for place, b, key in zip(places, blocks, hashes, strict=True) if key]
            if not named:
                return
            places, blocks, keys = (list(each) for each in zip(*named, strict=True))
        self.policy_state.completed(numbers_of(blocks), places, keys)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove the hashes of blocks, also of referenced ones."""
        super().evict_blocks(block_ids)
        blocks = self.blocks
        self.policy_state.lost([i for i in block_ids if blocks[i].block_hash is None])

    def reset_prefix_cache(self) -> bool:
        """Forget every hash, if no block is referenced."""
        done: bool = super().reset_prefix_cache()
        if done:
            self.free_block_queue.forget_contents()
        return done


def numbers_of(blocks: Sequence[Any]) -> array[int]:
    """Return the numbers of blocks."""
    return array("i", [block.block_id for block in blocks])


def install_policy(pool: Any, policy: str | EvictionPolicy | type[EvictionPolicy]) -> PolicyBlockPool:
    """Give vLLM's block pool an eviction policy. The pool stays the same object.

    Args:
        pool: A fresh `BlockPool` of vLLM.
        policy: A policy, as for `CacheManager`.

    Raises:
        TypeError: The pool is of another kind, or has a policy.
        ValueError: The pool is in use, or there is no such policy.
    """
    if not isinstance(pool, BlockPool) or isinstance(pool, PolicyBlockPool):
        raise TypeError(f"pool: got {type(pool).__name__}, needs vLLM's BlockPool, without a policy")
    free = pool.free_block_queue.get_all_free_blocks()
    if len(free) != pool.num_gpu_blocks - 1 or any(block.block_hash is not None for block in free):
        raise ValueError(
            f"pool: got one in use ({len(free)} of {pool.num_gpu_blocks - 1} blocks free), needs a fresh one"
        )
    state = PolicyPool(len(pool.blocks), make_policy(policy), lambda: len(pool.blocks) - 1 - pool.get_num_free_blocks())
    pool.free_block_queue = PolicyQueue(pool.blocks, free, state)
    pool.policy_state = state
    kind = type(pool)
    pool.has_vllms_table = has_own_table(pool)
    pool.__class__ = PolicyBlockPool if kind is BlockPool else type(kind.__name__, (PolicyBlockPool, kind), {})
    pool.__dict__ = dict(pool.__dict__)  # without it, attributes of a changed class are slow: 4 % of a step
    installed: PolicyBlockPool = pool
    return installed
