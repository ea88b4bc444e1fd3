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
        queue = self.free_block_queue
        found = [block for block in blocks if not block.is_null]
        for block in found:
            if block.ref_cnt == 0:
                queue.discard(block)
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)
        if found:
            self.policy_state.accessed(found)

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Blocks for a request, those without content first, then the policy's victims."""
        taken: list[Any] = super().get_new_blocks(num_blocks)
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
        self.policy_state.given_back([b for b in blocks if not b.is_null and (b.pool is None or b.pool is self)])
        super().free_blocks(blocks)

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
        self.policy_state.flush()
        had = block.block_hash
        named = super().cache_partial_block(request, block, num_tokens, kv_cache_group_id, block_size, *args, **kwargs)
        if named is not None and block.block_hash != had:
            self.policy_state.completed([block], (num_tokens - 1) // block_size)
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
        """Blocks lose their hashes, held ones too; the policy hears of them while they hold."""
        self.policy_state.flush()
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
    installed: PolicyBlockPool = pool
    return installed
