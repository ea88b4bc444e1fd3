"""What an eviction policy may read of vLLM's blocks, and what it is told, in runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        self._ref_count = np.zeros(self.num_blocks, np.int32)
        self._changed: list[int] = []
        self._fresh: list[int] = []
        self._completed: list[int] = []
        self._lengths: list[int] = []
        self._num_free = num_free
        self.policy = policy
        self.order_only = type(policy) is LRU
        policy.bind(self)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold, vLLM's null block not counted."""
        return self.num_blocks - 1 - self._num_free()

    @property
    def ref_count(self) -> npt.NDArray[np.int32]:
        """Holders of each block; few policies look at them, so they are brought up to date when one does."""
        if self._changed:
            ids, self._changed = self._changed, []
            self._ref_count[ids] = [self.blocks[i].ref_cnt for i in ids]
        return self._ref_count

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """64 bits of the hash of each block, its group counted in; 0 for one that has lost its hash."""
        hashes = [self.blocks[i].block_hash for i in ids.tolist()]
        width = max((len(key) for key in hashes if key is not None), default=12)
        lost = bytes(width)
        raw = np.frombuffer(b"".join([key or lost for key in hashes]), np.uint8).reshape(-1, width)
        keys: npt.NDArray[np.uint64] = raw[:, :8].copy().view(np.uint64)[:, 0]
        # The last bytes of vLLM's key are the group: layers of one group do not stand for those of another.
        groups = raw[:, -4:].copy().view(">u4")[:, 0].astype(np.uint64)
        keys ^= groups * np.uint64(0x9E3779B97F4A7C15)
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
            places = [n for n, block in enumerate(blocks) if block.block_hash is not None]
            self._completed += [blocks[n].block_id for n in places]
            self._lengths += [before + 1 + n for n in places]
            if len(self._completed) > MANY:
                self.flush()

    def flush(self) -> None:
        """Tells the policy what has been noted."""
        if self._fresh:
            self._changed += self._fresh
            ids, self._fresh = np.array(self._fresh, np.int32), []
            self.clock += 1
            self.access_count[ids] = 1
            self.last_access[ids] = self.clock
            self.policy.accessed(ids, False)
        if self._completed:
            ids, lengths = np.array(self._completed, np.int32), self._lengths
            self._completed, self._lengths = [], []
            self.prefix_length[ids] = lengths
            self.policy.completed(ids)

    def accessed(self, blocks: list[Any]) -> None:
        """Cached blocks were found and taken, in the order of their sequence; vLLM has counted the holder already."""
        self.flush()
        found = [block.block_id for block in blocks]
        ids = np.array(found, np.int32)
        self.clock += 1
        if not self.order_only:
            self._changed += found
            self.access_count[ids] += 1
            self.last_access[ids] = self.clock
        self.policy.accessed(ids, True)

    def given_back(self, blocks: list[Any]) -> None:
        """A holder less for each of these blocks."""
        if not self.order_only and blocks:
            self.flush()
            self._changed += [block.block_id for block in blocks]
            if len(self._changed) > 4 * self.num_blocks:
                self._changed = list(set(self._changed))

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
        self._changed, self._fresh, self._completed, self._lengths = [], [], [], []
        for field in (self._ref_count, self.access_count, self.prefix_length):
            field.fill(0)
        self.policy.clear()
