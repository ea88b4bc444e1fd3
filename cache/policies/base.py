"""What an eviction policy is told, asked, and allowed to read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..hashing import TokenIds
from ..table import Ids


class Block(NamedTuple):
    """A block as `EvictionPolicy.acquire` returns it.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> block = manager.pools[0].policy.acquire(range(6))[0]
        >>> block.number, block.cached, block.ref_count, block.prefix_length
        (0, False, 1, 1)
    """

    number: int
    """Block number."""
    cached: bool
    """Whether its KV was there; else it is fresh and has to be computed."""
    hash: bytes | None
    """Its identity, None for a partial block."""
    ref_count: int
    last_access: int
    """Tick of the pool's clock, which advances with every access and release."""
    access_count: int
    prefix_length: int
    """Complete blocks of its sequence up to and including this one."""


class PoolView(Protocol):
    """What a policy may read of the blocks it chooses among; `pc.cache.pool.BlockPool` is one.

    An adapter that puts a policy behind another engine's pool gives it these. Arrays are `[num_blocks]`, indexed by
    block number and kept up to date before a policy is told of what changed them.

    Examples:
        >>> pool = pc.CacheManager(num_blocks=8, block_size=4).pools[0]
        >>> pool.num_blocks, pool.num_held, pool.ref_count.shape
        (8, 0, (8,))
    """

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, free ones included."""

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""

    @property
    def clock(self) -> int:
        """The tick of now: rises with every access and every release."""

    @property
    def ref_count(self) -> npt.NDArray[np.int32]:
        """Holders of each block."""

    @property
    def last_access(self) -> npt.NDArray[np.int64]:
        """Tick of the last access or release."""

    @property
    def access_count(self) -> npt.NDArray[np.int32]:
        """Requests that took the block since it was last filled."""

    @property
    def prefix_length(self) -> npt.NDArray[np.int32]:
        """Blocks of its sequence up to and including it."""

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """64 bits of the hash of each block: equal for equal content, also after an eviction."""

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """What `EvictionPolicy.acquire` returns."""


class EvictionPolicy(ABC):
    """Decides which unreferenced block is evicted next.

    A policy is told of accesses and releases in whole runs of blocks, in the order of their sequence, and asked for
    victims. It may read what `PoolView` has and writes none of it. Only `victims` has to be written; see
    docs/policies.md for a policy of one's own.

    Examples:
        >>> class MostRecent(pc.EvictionPolicy):
        ...     def bind(self, pool):
        ...         super().bind(pool)
        ...         self.order = []
        ...     def accessed(self, ids, hit):
        ...         self.removed(ids)
        ...     def released(self, ids):
        ...         self.order += ids.tolist()
        ...     def removed(self, ids):
        ...         self.order = [block for block in self.order if block not in ids]
        ...     def victims(self, count):
        ...         chosen, self.order = self.order[-count:], self.order[:-count]
        ...         return np.array(chosen, np.int32)
        ...     def clear(self):
        ...         self.order = []
        >>> manager = pc.CacheManager(num_blocks=2, block_size=4, policy=MostRecent)
        >>> for request in range(3):
        ...     allocation = manager.allocate(request, range(10 * request, 10 * request + 4))
        ...     merged = manager.commit(request, 4)
        ...     manager.free(request)
        >>> manager.stats().evictions
        1
    """

    pool: PoolView

    def bind(self, pool: PoolView) -> None:
        """Gives the policy its pool, once, before anything else; per-block state is made here."""
        self.pool = pool

    def accessed(self, ids: Ids, hit: bool) -> None:  # noqa: B027  most policies need not know
        """A request took these blocks: cached ones (`hit`), or fresh ones about to be computed."""

    def hinted(self, ids: Ids, priority: int, ttl: float | None) -> None:  # noqa: B027
        """A request asked to keep these blocks: `priority` above 0, for `ttl` seconds; called after `accessed`."""

    def completed(self, ids: Ids) -> None:  # noqa: B027
        """These blocks are written and published: their hashes hold. The array changes afterwards."""

    def returning(self, probability: float) -> None:  # noqa: B027
        """The caller of `free` said how likely the conversation goes on soon; `finished` follows at once."""

    def finished(self, output_tokens: int) -> None:  # noqa: B027
        """A request has ended after so many tokens of its own; its releases follow."""

    def released(self, ids: Ids) -> None:  # noqa: B027
        """The reference counts of these cached blocks are 0 now: from now on they may be chosen."""

    @abstractmethod
    def victims(self, count: int) -> Ids:
        """Chooses `count` of the released blocks, none twice, and forgets them. At least `count` are there."""

    def removed(self, ids: Ids) -> None:  # noqa: B027
        """These released blocks left without being chosen."""

    def clear(self) -> None:  # noqa: B027
        """The pool was emptied: forget every block."""

    def check(self) -> None:  # noqa: B027
        """Asserts that the policy's own state holds together; changes nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes of the policy's arrays and queues."""
        total = 0
        for value in vars(self).values():
            for part in value if isinstance(value, list | tuple) else (value,):
                total += int(getattr(part, "nbytes", 0)) if part is not self.pool else 0
        return total

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Takes the blocks of a sequence: the cached prefix, then fresh ones for the rest, evicting as needed.

        Args:
            sequence: Token ids, or the hashes of its blocks in order.

        Returns:
            One `Block` per (complete or partial) block. They are referenced until `pool.release`.

        Raises:
            OutOfBlocks: Too few free and unreferenced blocks; nothing has changed.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
            >>> blocks = manager.pools[0].policy.acquire(range(6))
            >>> [(block.number, block.cached) for block in blocks]
            [(0, False), (1, False)]
        """
        return self.pool.acquire(sequence)
