"""vLLM's block pool with an eviction policy in place of its queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from ....cache.policies import EvictionPolicy, make_policy
from .queue import PolicyQueue
from .state import PolicyState


class PolicyBlockPool(BlockPool):
    """A `BlockPool` whose policy is told of what vLLM's queue never sees: hits on held blocks, hashes, fresh blocks.

    Made from vLLM's pool by `install_policy`, since everything that holds the pool is to go on holding it.
    """

    policy_state: PolicyState
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
        taken = queue.popleft_n(num_blocks)
        for block in taken:
            if block.ref_cnt:
                raise RuntimeError(f"{type(self.policy_state.policy).__name__}.victims: got a block that is held")
            block.ref_cnt = 1
        if self._reuse_watchers:
            self._notify_reuse(taken)
        if self.enable_caching:
            for block in taken if self.metrics_collector else taken[empty:]:
                self._maybe_evict_cached_block(block)
        if self.metrics_collector:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        self.policy_state.took(taken)
        if self.handed_out is not None:
            self.handed_out += [block.block_id for block in taken]
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """A holder gives these blocks back, the last of its sequence first."""
        if self.policy_state.order_only:
            super().free_blocks(ordered_blocks)
            return
        blocks = list(ordered_blocks)
        self.policy_state.shared([block for block in blocks if block.ref_cnt > 1 and self._is_own(block)])
        super().free_blocks(blocks)

    def _is_own(self, block: Any) -> bool:
        return not block.is_null and (block.pool is None or block.pool is self)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Any) -> None:
        """As `free_blocks`, of blocks that somebody reads until they are handed out anew."""
        released = list(blocks)
        self.policy_state.shared([block for block in released if block.ref_cnt > 1])
        super().unpin_blocks(released, on_reuse)

    def cache_full_blocks(
        self, request: Any, blocks: list[Any], num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        """Blocks of a request get their hashes."""
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        if num_cached_blocks < num_full_blocks:
            self.policy_state.completed(blocks[num_cached_blocks:num_full_blocks], num_cached_blocks)

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
    kind = type(pool)
    pool.__class__ = PolicyBlockPool if kind is BlockPool else type(kind.__name__, (PolicyBlockPool, kind), {})
    pool.__dict__ = dict(pool.__dict__)  # else attributes of an object of a changed class are slow: 4 % of a step
    installed: PolicyBlockPool = pool
    return installed
