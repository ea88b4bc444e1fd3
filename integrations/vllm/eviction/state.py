"""What an eviction policy may read of vLLM's blocks, and what it is told, in runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....cache.hashing import TokenIds
from ....cache.policies import Block, EvictionPolicy
from ....cache.table import Ids


class PolicyState:
    """A `PoolView` over the blocks of vLLM's pool.

    What happens to blocks that are held cannot change a decision before they are free, so a policy is told of fresh and
    completed blocks together, before it is told of hits and releases, or at the end of a step: one vector operation
    instead of one for each request that decodes.

    Args:
        blocks: Every block of the pool, by number; the null block is among them and never told of.
        policy: A fresh policy.
    """

    def __init__(self, blocks: list[Any], policy: EvictionPolicy) -> None:
        self.blocks = blocks
        self.num_blocks = len(blocks)
        self.num_held = 0
        self.clock = 0
        self.ref_count = np.zeros(self.num_blocks, np.int32)
        self.last_access = np.zeros(self.num_blocks, np.int64)
        self.access_count = np.zeros(self.num_blocks, np.int32)
        self.prefix_length = np.zeros(self.num_blocks, np.int32)
        self._fresh: list[int] = []
        self._completed: list[int] = []
        self._lengths: list[int] = []
        self.policy = policy
        self._takes_returns = "returns" in inspect.signature(policy.finished).parameters
        policy.bind(self)

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """64 bits of the hash of each block, its group counted in; 0 for one that has lost its hash."""
        hashes = [self.blocks[i].block_hash for i in ids.tolist()]
        # The group is in the last bytes of vLLM's key: layers of one group do not stand for those of another.
        return np.array([0 if key is None else _key(key) for key in hashes], np.uint64)

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Refused: vLLM takes blocks, the policy only chooses."""
        raise NotImplementedError("acquire: blocks are taken by vLLM's scheduler")

    def took(self, ids: list[int]) -> None:
        """Fresh blocks were taken."""
        self._fresh += ids

    def completed(self, ids: list[int], lengths: list[int]) -> None:
        """Blocks got their hashes; `lengths` are the blocks of their sequence up to and including each."""
        self._completed += ids
        self._lengths += lengths

    def flush(self) -> None:
        """Tells the policy what has been noted."""
        if self._fresh:
            ids, self._fresh = np.array(self._fresh, np.int32), []
            self.clock += 1
            self.num_held += ids.size
            self.ref_count[ids] = 1
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
        ids = np.array([block.block_id for block in blocks], np.int32)
        self.clock += 1
        refs = self.ref_count[ids]
        self.num_held += ids.size - int(np.count_nonzero(refs))
        self.ref_count[ids] = refs + 1
        self.access_count[ids] += 1
        self.last_access[ids] = self.clock
        self.policy.accessed(ids, True)

    def given_back(self, ids: list[int]) -> None:
        """A holder less for each of these blocks."""
        self.flush()
        refs = self.ref_count[ids] - 1
        self.num_held -= len(ids) - int(np.count_nonzero(refs))
        self.ref_count[ids] = refs

    def released(self, ids: list[int]) -> None:
        """Nobody holds these cached blocks any more; in the order of their sequence."""
        self.flush()
        run = np.array(ids, np.int32)
        self.clock += 1
        self.last_access[run] = self.clock
        self.policy.released(run)

    def hinted(self, ids: list[int], priority: int, ttl: float | None) -> None:
        """A request asked to keep these blocks."""
        self.flush()
        self.policy.hinted(np.array(ids, np.int32), priority, ttl)

    def finished(self, output_tokens: int, returns: float | None) -> None:
        """A request has ended; its releases follow. A policy written before there was `returns` goes without."""
        self.flush()
        told = {"returns": returns} if returns is not None and self._takes_returns else {}
        self.policy.finished(output_tokens, **told)

    def clear(self) -> None:
        """The prefix cache was emptied."""
        self._fresh, self._completed, self._lengths = [], [], []
        self.num_held = 0
        for field in (self.ref_count, self.access_count, self.prefix_length):
            field.fill(0)
        self.policy.clear()


def _key(block_hash: bytes) -> int:
    """64 bits of vLLM's key of a block: of its hash, and its group."""
    group = int.from_bytes(block_hash[-4:], "big")
    return (int.from_bytes(block_hash[:8], "little") ^ group * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
