"""Memory for `CacheManager.explain`. Without it everything works, but misses cannot be explained.

For each request that ended with published blocks, `History` keeps the tokens that were written after the request's hit.
The tokens of the hit were remembered with the request that computed them. A block's hash covers all tokens before it.
So the hash at the end of a hit identifies the remembered piece before the request's own tokens. `History` also keeps
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
from ..request import Request

TOKEN_BYTES = 64
"""Bytes of remembered tokens for each block of the largest pool: enough for all its tokens with blocks of 16."""
HASH_BYTES = 32
"""Bytes of remembered hashes for each block of all pools."""
LEAST_BYTES = 1 << 16
"""Minimum capacity for tokens and for hashes, in bytes, however few blocks there are."""
ENTRY_BYTES = 256
"""Bytes of an entry besides its tokens or hashes."""

Ended = tuple[EncodedKeys, bytes | None, "array[int]", int]
"""A request that left published blocks: its keys; the hash of the block before its own tokens, or None if there is
none; these tokens; the number of written positions."""

T = TypeVar("T")


class History:
    """Memory of requests that ended (`ended`), and of blocks that pools evicted, with the time (`evicted`).

    Each entry is stored with its number of bytes. `num_blocks` has the size of each pool.
    """

    def __init__(self, block_size: int, num_blocks: Sequence[int]) -> None:
        self._block_size = block_size
        self.ended: deque[tuple[Ended, int]] = deque()
        self.evicted: deque[tuple[tuple[float, Words, int], int]] = deque()
        text_bytes, hash_bytes = TOKEN_BYTES * max(num_blocks), HASH_BYTES * sum(num_blocks)
        self._capacities = max(text_bytes, LEAST_BYTES), max(hash_bytes, LEAST_BYTES)
        self._sizes = [0, 0]  # bytes of `ended`, and of `evicted`

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(self._sizes)

    def _add(self, number: int, entries: deque[tuple[T, int]], entry: T, nbytes: int) -> None:
        """Add an entry, and forget the oldest entries that no longer fit. `number`: 0 for `ended`, 1 for `evicted`."""
        entries.append((entry, nbytes))
        self._sizes[number] += nbytes
        while self._sizes[number] > self._capacities[number] and entries:
            self._sizes[number] -= entries.popleft()[1]

    def add_text(self, text: Ended) -> None:
        """Remember the text of a request that ended."""
        self._add(0, self.ended, text, ENTRY_BYTES + 4 * len(text[2]))

    def request_ended(self, request: Request) -> None:
        """Remember the written text of a request that has published blocks."""
        if request.published:
            size, tokens, committed = self._block_size, request.tokens, request.committed
            # If the tokens end inside the first block that is not published, keep all of them: they may explain a miss.
            end = len(tokens) if len(tokens) < (committed // size + 1) * size else committed
            before = request.digests[request.hit - 1].tobytes() if request.hit else None
            self.add_text((request.keys, before, tokens[request.hit * size : end], committed))

    def blocks_evicted(self, words: Words, group: int) -> None:
        """Remember hashes that a group has evicted, `[blocks, words]`; the array is kept."""
        self._add(1, self.evicted, (monotonic(), words, group), ENTRY_BYTES + words.nbytes)
