"""vLLM's block pool with an eviction policy in place of its queue."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from ....cache.policies import EvictionPolicy, make_policy
from .bulk import drop_hashes, give_hashes, is_plain
from .queue import PolicyQueue
from .state import PolicyState


class PolicyBlockPool(BlockPool):
    """A `BlockPool` whose policy is told of what vLLM's queue never sees: hits on held blocks, hashes, fresh blocks.

    Made from vLLM's pool by `install_policy`, since everything that holds the pool is to go on holding it.
    """

    policy_state: PolicyState
    plain: bool
    """See `is_plain`, of the pool that it was."""
    handed_out: list[int] | None = None
    """Blocks handed out since somebody took this list, where somebody does."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """A request found these blocks."""
        found = [block for block in blocks if not block.is_null]
        returned = self.free_block_queue.discard([block for block in found if block.ref_cnt == 0])
        for block in found:
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)
        if found:
            self.policy_state.accessed(found, returned)

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Blocks for a request, those without content first, then the policy's victims.

        Raises:
            ValueError: More than are free.
            RuntimeError: The policy chose too few blocks, or one that somebody holds.
        """
        queue: PolicyQueue = self.free_block_queue
        if num_blocks > queue.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        empty = queue.num_empty_blocks
        taken, numbers = queue.take(num_blocks)
        for block in taken:
            if block.ref_cnt:
                raise RuntimeError(f"{type(self.policy_state.policy).__name__}.victims: got a block that is held")
            block.ref_cnt = 1
        if self._reuse_watchers:
            self._notify_reuse(taken)
        if self.enable_caching:
            drop_hashes(self, taken if self.metrics_collector else taken[empty:])
        if self.metrics_collector:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        self.policy_state.took(numbers)
        if self.handed_out is not None:
            self.handed_out += numbers
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """A holder gives these blocks back, the last of its sequence first."""
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
            elif block._block_hash is None or not self.enable_caching:
                empty.append(block)
            else:
                cached.append(block.block_id)
        self.policy_state.shared(shared)
        self.free_block_queue.prepend_n(empty)
        self.free_block_queue.append_numbers(cached[::-1])
        if others:
            super().free_blocks(others)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Any) -> None:
        """As `free_blocks`, of blocks that somebody reads until they are handed out anew."""
        released = list(blocks)
        self.policy_state.shared([block.block_id for block in released if block.ref_cnt > 1])
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
        """Blocks of a request get their hashes."""
        if num_cached_blocks >= num_full_blocks:
            return
        full = blocks[num_cached_blocks:num_full_blocks]
        keys: list[bytes] | None = None
        left = [(num_cached_blocks, num_full_blocks)]
        if block_size == self.hash_block_size and not args and not any(kwargs.values()):
            keys, left = give_hashes(self, request, full, num_cached_blocks, kv_cache_group_id)
        for first, last in left:
            super().cache_full_blocks(request, blocks, first, last, block_size, kv_cache_group_id, *args, **kwargs)
        self.policy_state.completed(full, num_cached_blocks, None if left else keys)

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
        """Part of a block gets a hash, perhaps in place of another."""
        had = block.block_hash
        named = super().cache_partial_block(request, block, num_tokens, kv_cache_group_id, block_size, *args, **kwargs)
        if named is not None and block.block_hash != had:
            self.policy_state.completed([block], (num_tokens - 1) // block_size)
            self.policy_state.flush()  # before it may get the hash of a full one
        return named

    def move_block_hashes(self, src_block: Any, dst_block: Any) -> None:
        """The content of a block is kept in a copy."""
        self.policy_state.flush()
        super().move_block_hashes(src_block, dst_block)
        length = int(self.policy_state.prefix_length[src_block.block_id])
        if src_block.block_hash is None:
            self.policy_state.lost([src_block.block_id])
        self.policy_state.completed([dst_block], length - 1)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Blocks lose their hashes, held ones too."""
        super().evict_blocks(block_ids)
        blocks = self.blocks
        self.policy_state.lost([i for i in block_ids if blocks[i].block_hash is None])

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash, if no block is held."""
        done: bool = super().reset_prefix_cache()
        if done:
            self.free_block_queue.forget_contents()
        return done


def install_policy(pool: Any, policy: str | EvictionPolicy | type[EvictionPolicy]) -> PolicyBlockPool:
    """Puts an eviction policy behind vLLM's pool, which is the same object afterwards.

    Args:
        pool: vLLM's `BlockPool`, before any request.
        policy: As for `CacheManager`.

    Raises:
        TypeError: Another kind of pool.
        ValueError: A pool in use, or as `make_policy`.
    """
    if not isinstance(pool, BlockPool) or isinstance(pool, PolicyBlockPool):
        raise TypeError(f"pool: got {type(pool).__name__}, needs vLLM's BlockPool, without a policy")
    free = pool.free_block_queue.get_all_free_blocks()
    if len(free) != pool.num_gpu_blocks - 1 or any(block.block_hash is not None for block in free):
        raise ValueError(
            f"pool: got one in use ({len(free)} of {pool.num_gpu_blocks - 1} blocks free), needs a fresh one"
        )
    state = PolicyState(pool.blocks, make_policy(policy), pool.get_num_free_blocks)
    pool.free_block_queue = PolicyQueue(pool.blocks, free, state)
    pool.policy_state = state
    pool.plain = is_plain(pool)
    kind = type(pool)
    pool.__class__ = PolicyBlockPool if kind is BlockPool else type(kind.__name__, (PolicyBlockPool, kind), {})
    pool.__dict__ = dict(pool.__dict__)  # else attributes of an object of a changed class are slow: 4 % of a step
    installed: PolicyBlockPool = pool
    return installed
