"""vLLM's block pool with an eviction policy in place of its queue.

What vLLM does to blocks one by one, in several calls each, is done to many in one loop: those calls are more than a
third of a step that allocates and evicts. With KV events or metrics, and for unusual blocks, vLLM's own are called.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from ....cache.policies import EvictionPolicy, make_policy
from ...policy_pool import PolicyPool
from ..api import packed_blocks_stored
from .queue import PolicyQueue


class PolicyBlockPool(BlockPool):
    """A `BlockPool` with a policy, notified of what vLLM's queue never sees: hits on referenced blocks, hashes.

    `install_policy` makes it of vLLM's pool, in place: the scheduler and its managers hold that object.
    """

    policy_state: PolicyPool
    has_vllms_table: bool
    """Whether the pool was vLLM's own class, with the table of hashes that is written to here."""
    handed_out: list[int] | None = None
    """Blocks handed out since the scheduler last took this list; None where it does not."""
    contents: Any = None
    """What follows which text blocks hold (`MovedJumps`), None where no request asked."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """A request found these blocks."""
        found = [block for block in blocks if not block.is_null]
        returned = self.free_block_queue.discard([block for block in found if block.ref_cnt == 0])
        for block in found:
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)
        if found:
            self.policy_state.accessed(numbers_of(found), numbers_of(returned))

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Blocks for a request, those without content first, then victims; RuntimeError for a policy's bad choice."""
        queue: PolicyQueue = self.free_block_queue
        if num_blocks > queue.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        empty = queue.num_empty_blocks
        taken, numbers = queue.take(num_blocks)
        for block in taken:
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
        """A request releases these blocks, the last of its sequence first."""
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
        self.policy_state.dropped(shared)
        self.free_block_queue.prepend_n(empty)
        self.free_block_queue.append_numbers(cached[::-1])
        if others:
            super().free_blocks(others)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Any) -> None:
        """As `free_blocks`, of blocks that a connector reads until they are handed out anew."""
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
        """Part of a block gets a hash, perhaps in place of another."""
        had = block.block_hash
        named = super().cache_partial_block(request, block, num_tokens, kv_cache_group_id, block_size, *args, **kwargs)
        if named is not None and block.block_hash != had:
            self._completed([block], (num_tokens - 1) // block_size)
            self.policy_state.flush()  # before it may get the hash of a full one
        return named

    def cache_packed_blocks(self, request: Any, blocks: list[Any], keys: list[bytes]) -> None:
        """Give the packed blocks of a compressed text their keys, which cover the text that they were packed from."""
        for block, key in zip(blocks, keys, strict=True):
            self._insert_block_hash(key, block, num_tokens=self.hash_block_size)
        self._completed(blocks, 0, keys)
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(packed_blocks_stored(self, request, keys))

    def move_block_hashes(self, src_block: Any, dst_block: Any) -> None:
        """The content of a block is kept in a copy."""
        self.policy_state.flush()
        super().move_block_hashes(src_block, dst_block)
        length = int(self.policy_state.prefix_length[src_block.block_id])
        if src_block.block_hash is None:
            self.policy_state.lost([src_block.block_id])
        self._completed([dst_block], length - 1)

    def _completed(self, blocks: list[Any], before: int, keys: list[bytes] | None = None) -> None:
        """Blocks from number `before` of their sequence on got hashes, or some did; `keys` where all have one."""
        if self.policy_state.is_lru:
            return
        places: Sequence[int] = range(before + 1, before + 1 + len(blocks))
        if keys is None:
            # The property takes ten times as long.
            named = [(place, b, b._block_hash) for place, b in zip(places, blocks, strict=True) if b._block_hash]
            if not named:
                return
            places, blocks, keys = (list(each) for each in zip(*named, strict=True))
        self.policy_state.completed(numbers_of(blocks), places, keys)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Blocks lose their hashes, referenced ones too."""
        super().evict_blocks(block_ids)
        blocks = self.blocks
        self.policy_state.lost([i for i in block_ids if blocks[i].block_hash is None])

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash, if no block is referenced."""
        done: bool = super().reset_prefix_cache()
        if done:
            self.free_block_queue.forget_contents()
        return done


def numbers_of(blocks: Sequence[Any]) -> array[int]:
    """Numbers of blocks."""
    return array("i", [block.block_id for block in blocks])


def install_policy(pool: Any, policy: str | EvictionPolicy | type[EvictionPolicy]) -> PolicyBlockPool:
    """Puts an eviction policy, as for `CacheManager`, behind vLLM's pool, which is the same object afterwards.

    Raises TypeError for another kind of pool, ValueError for one in use, and as `make_policy`.
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
    pool.has_vllms_table = kind is BlockPool and type(getattr(pool.cached_block_hash_to_block, "_cache", None)) is dict
    pool.__class__ = PolicyBlockPool if kind is BlockPool else type(kind.__name__, (PolicyBlockPool, kind), {})
    pool.__dict__ = dict(pool.__dict__)  # else attributes of an object of a changed class are slow: 4 % of a step
    installed: PolicyBlockPool = pool
    return installed


def _table_of(pool: Any) -> dict[bytes, Any] | None:
    """The blocks by key; None where vLLM's own methods have to be called."""
    watched = pool.enable_kv_cache_events or pool.metrics_collector or pool.cached_block_hashes_by_block
    return pool.cached_block_hash_to_block._cache if pool.has_vllms_table and not watched else None


def drop_hashes(pool: Any, blocks: list[Any]) -> None:
    """As `_maybe_evict_cached_block` of each block."""
    table = _table_of(pool)
    if table is None:
        for block in blocks:
            pool._maybe_evict_cached_block(block)
        return
    for block in blocks:
        key = block._block_hash
        if key is not None:
            found = table.pop(key, None)
            if found is block:
                block._block_hash = block._block_hash_num_tokens = None
                continue
            if found is not None:  # several blocks have the hash
                table[key] = found
            pool._maybe_evict_cached_block(block)


def give_hashes(
    pool: Any, request: Any, blocks: list[Any], first: int, group: int
) -> tuple[list[bytes], list[tuple[int, int]]]:
    """As `cache_full_blocks`, of blocks from number `first` on whose tokens are as many as a hash covers.

    Gives the keys of all blocks, and the ranges of blocks for which vLLM's own method is still to be called.
    """
    table, size = _table_of(pool), pool.hash_block_size
    if table is None:
        return [], [(first, first + len(blocks))]
    ending = make_block_hash_with_group_id(b"", group)
    keys = [digest + ending for digest in request.block_hashes[first : first + len(blocks)]]
    left, tokens = [], first * size
    for block, key in zip(blocks, keys, strict=True):
        tokens += size
        if block._block_hash is not None or block.is_null or table.setdefault(key, block) is not block:
            left.append((tokens // size - 1, tokens // size))
        else:
            block._block_hash = key
            block._block_hash_num_tokens = tokens
    return keys, left
