"""Functions to use a policy without a manager: allocate blocks in a pool, and choose victims for an engine's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..hashing import TokenIds, encode_tokens, split_digests
from ..table import Ids
from .base import Block, EvictionPolicy


def acquire(pool: Any, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
    """Allocate the blocks of a sequence in a `BlockPool`; see `EvictionPolicy.acquire`."""
    size, words = pool.hasher.block_size, pool.hasher.words
    if len(sequence) and isinstance(sequence[0], bytes):
        raw, count = b"".join(sequence), len(sequence)  # type: ignore[arg-type]
        if len(raw) != 8 * words * count:
            raise ValueError(f"sequence: got {len(raw)} bytes, needs {count} hashes of {8 * words}")
        digests = np.frombuffer(raw, np.uint64).reshape(count, words)
    else:
        tokens = encode_tokens(sequence, "sequence")  # type: ignore[arg-type]
        count = -(-len(tokens) // size)
        digests = pool.hasher.hash_blocks(tokens)
    hits = pool.table.leading(digests)
    pool.check_available(count - hits.size, hits)
    if hits.size:
        pool.hold(hits)
    ids = hits
    if count > hits.size:
        ids = np.concatenate((hits, pool.take(np.arange(hits.size + 1, count + 1, dtype=np.int32))))
    hashes = [*split_digests(digests), None]
    fields = (pool.ref_count, pool.last_access, pool.access_count, pool.prefix_length)
    return [
        Block(block, i < hits.size, hashes[min(i, digests.shape[0])], *(field.item(block) for field in fields))
        for i, block in enumerate(ids.tolist())
    ]


def choose(policy: EvictionPolicy, count: int) -> Ids:
    """Ask a policy for `count` victims and check them. Engines with their own pool call this to evict blocks.

    Raises:
        RuntimeError: See `check_victims`.

    Examples:
        >>> from pc.cache.policies import choose
        >>> manager = pc.CacheManager(num_blocks=2, block_size=4)
        >>> allocation = manager.allocate("a", range(4))
        >>> merged = manager.commit("a", 4)
        >>> manager.free("a")
        >>> choose(manager.pools[0].policy, 1).tolist()
        [0]
    """
    ids = policy.victims(count)
    check_victims(policy, ids, count)
    return ids


def check_victims(policy: EvictionPolicy, ids: Any, count: int) -> None:
    """Raise RuntimeError unless `ids` is an array of `count` different blocks of a policy's pool that no request holds.

    Victims of the policies of `pc.cache` are not checked for range and repetition.
    """
    name = type(policy).__name__
    if not (isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.ndim == 1):
        raise RuntimeError(f"{name}.victims: got {ids!r:.60}, needs a 1-D array of block numbers")
    if len(ids) != count:
        raise RuntimeError(f"{name}.victims: got {len(ids)}, needs {count} blocks")
    if not type(policy).__module__.startswith("pc.cache.") and count:
        if not 0 <= ids.min() <= ids.max() < policy.pool.num_blocks:
            got = f"blocks {ids.min()} to {ids.max()}"
            raise RuntimeError(f"{name}.victims: got {got}, needs 0 to {policy.pool.num_blocks - 1}")
        if len(np.unique(ids)) != count:
            raise RuntimeError(f"{name}.victims: got a block twice")
    if policy.pool.ref_count[ids].any():
        raise RuntimeError(f"{name}.victims: got a block that is referenced")
