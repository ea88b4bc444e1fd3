"""Memory for `CacheManager.explain`. Without it everything works, but misses cannot be explained.

For each request that ended with published blocks, `History` keeps the tokens that were written after the request's hit.
The tokens of the hit were remembered with the request that computed them. A block's hash covers all tokens before it,
so the hash at the end of a hit identifies the remembered piece before the request's own tokens. `History` also keeps
hashes of evicted blocks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TypeVar

from ..hashing import Words
from ..keys import EncodedKeys
from ..pool import BlockPool
from ..request import Request

TOKEN_BYTES = 64
"""Bytes of remembered tokens for each block of a pool: enough for all its tokens with blocks of 16."""
HASH_BYTES = 32
"""Bytes of remembered hashes for each block of a pool."""
LEAST_BYTES = 1 << 16
"""Minimum capacity for tokens and for hashes, in bytes, however few blocks there are."""
ENTRY_BYTES = 256
"""Bytes of an entry besides its tokens or hashes."""

Ended = tuple[EncodedKeys, bytes | None, "array[int]", int]
"""A request that left published blocks: its keys; the hash of the block before its own tokens, or None if there is
none; these tokens; the number of written positions."""

T = TypeVar("T")


class Latest(deque[tuple[T, int]]):
    """The latest entries, each with its size, up to `capacity` bytes in all."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.nbytes = max(capacity, LEAST_BYTES), 0

    def add(self, entry: T, nbytes: int) -> None:
        """Add an entry, and forget the oldest ones that no longer fit."""
        self.append((entry, nbytes))
        self.nbytes += nbytes
        while self.nbytes > self.capacity and self:
            self.nbytes -= self.popleft()[1]


class History:
    """Memory of requests that ended (`ended`), and of blocks that pools evicted, with the time (`evicted`)."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._block_size = pools[0].hasher.block_size
        self.ended: Latest[Ended] = Latest(TOKEN_BYTES * max([pool.num_blocks for pool in pools]))
        self.evicted: Latest[tuple[float, Words, int]] = Latest(HASH_BYTES * sum([pool.num_blocks for pool in pools]))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.ended.nbytes + self.evicted.nbytes

    def request_ended(self, request: Request) -> None:
        """Remember the written text of a request that has published blocks."""
        if request.published:
            size, tokens, committed = self._block_size, request.tokens, request.committed
            # If the tokens end inside the first block that is not published, keep all of them: they may explain a miss.
            end = len(tokens) if len(tokens) < (committed // size + 1) * size else committed
            before = request.digests[request.hit - 1].tobytes() if request.hit else None
            own = tokens[request.hit * size : end]
            self.ended.add((request.keys, before, own, committed), ENTRY_BYTES + 4 * len(own))

    def blocks_evicted(self, words: Words, group: int) -> None:
        """Remember hashes that a group has evicted, `[blocks, words]`; the array is kept."""
        self.evicted.add((monotonic(), words, group), ENTRY_BYTES + words.nbytes)
