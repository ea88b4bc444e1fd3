"""What an eviction policy may read of vLLM's blocks, and what it is told, in runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....cache.hashing import TokenIds
from ....cache.policies import LRU, Block, EvictionPolicy
from ....cache.table import Ids

MANY = 1024
"""So many completed blocks are told of at once, if nothing else happens before."""


class PolicyState:
    """A `PoolView` over the blocks of vLLM's pool.

    What happens to blocks that are held cannot change a decision before they are free, so a policy is told of fresh and
    completed blocks together, before it is told of hits and releases, or when many have come together: one vector
    operation instead of one for each request that decodes. lru is told of hits and releases alone, all it looks at.

    Args:
        blocks: Every block of the pool, by number; the null block is among them and never told of.
        policy: A fresh policy.
        num_free: Tells how many blocks are free.
    """

    def __init__(self, blocks: list[Any], policy: EvictionPolicy, num_free: Callable[[], int]) -> None:
        self.blocks = blocks
        self.num_blocks = len(blocks)
        self.clock = 0
        self.last_access = np.zeros(self.num_blocks, np.int64)
        self.access_count = np.zeros(self.num_blocks, np.int32)
        self.prefix_length = np.zeros(self.num_blocks, np.int32)
        self.ref_count = np.zeros(self.num_blocks, np.int32)
        self._keys = np.zeros(self.num_blocks, np.uint64)
        self._fresh: list[int] = []
        self._completed: list[int] = []
        self._lengths: list[int] = []
        self._hashes: list[bytes] = []
        self._num_free = num_free
        self.policy = policy
        self.order_only = type(policy) is LRU
        policy.bind(self)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold, vLLM's null block not counted."""
        return self.num_blocks - 1 - self._num_free()

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """64 bits of the hash of each block, its group counted in; 0 for one that has lost its hash."""
        keys: npt.NDArray[np.uint64] = self._keys.take(ids)
        return keys

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Refused: vLLM takes blocks, the policy only chooses."""
        raise NotImplementedError("acquire: blocks are taken by vLLM's scheduler")

    def took(self, blocks: list[Any]) -> None:
        """Fresh blocks were taken."""
        if not self.order_only:
            self._fresh += [block.block_id for block in blocks]

    def completed(self, blocks: list[Any], before: int) -> None:
        """Those of these blocks that have one got their hash; `before` blocks of their sequence come first."""
        if not self.order_only:
            hashes = [block.block_hash for block in blocks]
            if None not in hashes:
                self._completed += [block.block_id for block in blocks]
                self._lengths += range(before + 1, before + 1 + len(blocks))
                self._hashes += hashes
            else:
                places = [n for n, key in enumerate(hashes) if key is not None]
                self._completed += [blocks[n].block_id for n in places]
                self._lengths += [before + 1 + n for n in places]
                self._hashes += [hashes[n] for n in places]
            if len(self._completed) > MANY:
                self.flush()

    def flush(self) -> None:
        """Tells the policy what has been noted."""
        if self._fresh:
            ids, self._fresh = np.array(self._fresh, np.int32), []
            self.clock += 1
            self.ref_count[ids] = 1
            self.access_count[ids] = 1
            self.last_access[ids] = self.clock
            self._keys[ids] = 0
            self.policy.accessed(ids, False)
        if self._completed:
            ids, lengths, hashes = np.array(self._completed, np.int32), self._lengths, self._hashes
            self._completed, self._lengths, self._hashes = [], [], []
            self.prefix_length[ids] = lengths
            self._keys[ids] = _keys(hashes)
            self.policy.completed(ids)

    def lost(self, ids: Iterable[int]) -> None:
        """Blocks have lost their hashes."""
        if not self.order_only:
            self._keys[np.fromiter(ids, np.intp)] = 0

    def accessed(self, blocks: list[Any]) -> None:
        """Cached blocks were found and taken, in the order of their sequence; vLLM has counted the holder already."""
        self.flush()
        found = [block.block_id for block in blocks]
        ids = np.array(found, np.int32)
        self.clock += 1
        if not self.order_only:
            self.ref_count[ids] += 1
            self.access_count[ids] += 1
            self.last_access[ids] = self.clock
        self.policy.accessed(ids, True)

    def given_back(self, blocks: list[Any]) -> None:
        """A holder less for each of these blocks."""
        if not self.order_only and blocks:
            self.flush()
            self.ref_count[[block.block_id for block in blocks]] -= 1

    def released(self, ids: list[int]) -> None:
        """Nobody holds these cached blocks any more; in the order of their sequence."""
        self.flush()
        run = np.array(ids, np.int32)
        self.clock += 1
        if not self.order_only:
            self.last_access[run] = self.clock
        self.policy.released(run)

    def hinted(self, ids: list[int], priority: int, ttl: float | None) -> None:
        """A request asked to keep these blocks."""
        self.flush()
        self.policy.hinted(np.array(ids, np.int32), priority, ttl)

    def finished(self, output_tokens: int, returns: float | None) -> None:
        """A request has ended; its releases follow."""
        self.flush()
        if returns is not None:
            self.policy.returning(returns)
        self.policy.finished(output_tokens)

    def clear(self) -> None:
        """The prefix cache was emptied."""
        self._fresh, self._completed, self._lengths, self._hashes = [], [], [], []
        for field in (self.ref_count, self.access_count, self.prefix_length, self._keys):
            field.fill(0)
        self.policy.clear()


def _keys(hashes: list[bytes]) -> npt.NDArray[np.uint64]:
    """64 bits of each of vLLM's hashes."""
    width = len(hashes[0])
    raw = np.frombuffer(b"".join(hashes), np.uint8)
    if raw.size != width * len(hashes):  # of several lengths, which one algorithm does not give
        raw = np.frombuffer(b"".join([key[:8] + key[-4:] for key in hashes]), np.uint8)
    raw = raw.reshape(len(hashes), -1)
    keys: npt.NDArray[np.uint64] = raw[:, :8].copy().view(np.uint64)[:, 0]
    # The last bytes of vLLM's key are the group: layers of one group do not stand for those of another.
    keys ^= raw[:, -4:].copy().view(">u4")[:, 0].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return keys
