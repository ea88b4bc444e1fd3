"""What vLLM does to blocks one by one, in several calls each, done to many in one loop.

Of a step in which prompts are allocated and blocks evicted these calls are more than a third. Where somebody listens
(KV events, metrics), or a block is not the plain case, vLLM's own methods are called.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id


def is_plain(pool: Any) -> bool:
    """Whether a pool is vLLM's own, with the table of hashes that is written to here."""
    return type(pool) is BlockPool and type(getattr(pool.cached_block_hash_to_block, "_cache", None)) is dict


def _table_of(pool: Any) -> dict[bytes, Any] | None:
    """The blocks by key, or None where vLLM is to be asked."""
    if not pool.plain or pool.enable_kv_cache_events or pool.metrics_collector or pool.cached_block_hashes_by_block:
        return None
    table: dict[bytes, Any] = pool.cached_block_hash_to_block._cache
    return table


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
    """As `cache_full_blocks` of blocks that have as many tokens as a hash covers.

    Args:
        pool: Their pool.
        request: Whose they are.
        blocks: Its blocks from number `first` on.
        first: See there.
        group: Their group.

    Returns:
        The keys of all blocks, and the ranges of the request's blocks that vLLM is still to be asked for.
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
