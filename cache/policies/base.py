"""The interface of eviction policies: their notifications, `victims`, and the view of a pool that they may read."""

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
    """Whether its KV is cached. Else the block is fresh and must be computed."""
    hash: bytes | None
    """Its hash; None for a partial block."""
    ref_count: int
    last_access: int
    """Tick of the pool's clock, which advances with every access and every release."""
    access_count: int
    prefix_length: int
    """Number of blocks of its sequence up to and including this one."""


class PoolView(Protocol):
    """The view of a pool that a policy may read, such as `pc.cache.pool.BlockPool`.

    An adapter that runs a policy for another engine's pool provides this view. Arrays are `[num_blocks]`, indexed by
    block number, and are updated before a policy is notified of the change.

    Examples:
        >>> pool = pc.CacheManager(num_blocks=8, block_size=4).pools[0]
        >>> pool.num_blocks, pool.num_held, pool.ref_count.shape
        (8, 0, (8,))
    """

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, free ones included."""

    @property
    def num_held(self) -> int:
        """Number of blocks that requests hold."""

    @property
    def clock(self) -> int:
        """The current tick, which advances with every access and every release."""

    @property
    def ref_count(self) -> npt.NDArray[np.int32]:
        """Reference count of each block."""

    @property
    def last_access(self) -> npt.NDArray[np.int64]:
        """Tick of each block's last access or release."""

    @property
    def access_count(self) -> npt.NDArray[np.int32]:
        """Number of requests that used the block since it was last filled."""

    @property
    def prefix_length(self) -> npt.NDArray[np.int32]:
        """Number of blocks of its sequence up to and including the block."""

    def keys_of(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """Return 64 bits of the hash of each block. Equal contents have equal bits, also after an eviction."""

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Allocate the blocks of a sequence; see `EvictionPolicy.acquire`."""


class EvictionPolicy(ABC):
    """A policy that decides which unreferenced block is evicted next.

    A policy is notified of accesses and releases in whole runs of blocks, in the order of their sequence, and is asked
    for victims. It may read the fields of `PoolView` and must not write them. A subclass must implement `victims`; all
    other methods are optional. See docs/policies.md for how to write a policy.

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
        """Give the policy its pool, once, before any other call. Make state for each block here."""
        self.pool = pool

    def accessed(self, ids: Ids, hit: bool) -> None:  # noqa: B027  most policies ignore it
        """Record that a request uses these blocks: cached blocks (`hit`), or fresh blocks that will be computed."""

    def hinted(self, ids: Ids, priority: int, ttl: float | None) -> None:  # noqa: B027
        """Record a request's hint for these blocks: keep them longer, for `ttl` seconds, if `priority` is above 0.

        Called after `accessed`.
        """

    def completed(self, ids: Ids) -> None:  # noqa: B027
        """Record that these blocks are written and published, so their hashes are valid.

        Copy the array to keep it, because the caller reuses it.
        """

    def returning(self, probability: float) -> None:  # noqa: B027
        """Record the probability, from the caller of `free`, that the conversation resumes soon.

        `finished` follows at once.
        """

    def finished(self, output_tokens: int) -> None:  # noqa: B027
        """Record that a request has ended after generating `output_tokens` tokens. Its releases follow."""

    def released(self, ids: Ids) -> None:  # noqa: B027
        """Record that the reference counts of these cached blocks are 0, so that they may be chosen as victims."""

    @abstractmethod
    def victims(self, count: int) -> Ids:
        """Choose `count` of the released blocks, without duplicates, and forget them.

        The caller has checked that there are enough.
        """

    def removed(self, ids: Ids) -> None:  # noqa: B027
        """Record that these released blocks left the cache without being chosen as victims."""

    def clear(self) -> None:  # noqa: B027
        """Forget every block: the pool was emptied."""

    def check(self) -> None:  # noqa: B027
        """Assert that the policy's own state is consistent. Change nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes of the policy's arrays and queues."""
        total = 0
        for value in vars(self).values():
            for part in value if isinstance(value, list | tuple) else (value,):
                total += int(getattr(part, "nbytes", 0)) if part is not self.pool else 0
        return total

    def acquire(self, sequence: TokenIds | Sequence[bytes]) -> list[Block]:
        """Allocate the blocks of a sequence.

        The cached prefix is reused, and the rest gets fresh blocks. Other blocks are evicted if needed.

        Args:
            sequence: Token ids, or the hashes of its blocks in order.

        Returns:
            A `Block` for each complete or partial block. The blocks are referenced until `pool.release`.

        Raises:
            OutOfBlocks: There are too few free and unreferenced blocks. Nothing has changed.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
            >>> blocks = manager.pools[0].policy.acquire(range(6))
            >>> [(block.number, block.cached) for block in blocks]
            [(0, False), (1, False)]
        """
        return self.pool.acquire(sequence)
