"""Hashes of earlier prompts, so that a prompt that begins with the same tokens is not hashed again.

Without them results are the same, only slower: `BlockHasher.begin` then hashes every block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .hashing import Chain

OVERHEAD = 800
"""Bytes of an entry besides its tokens and digests: objects, the dictionary and the state of a hasher."""
BLOCK_BYTES = 256
"""Bytes that the bookkeeping of a block may use. Remembered hashes get the rest."""
BASE_BYTES = 1 << 20
"""Additional bytes that bookkeeping may use, for any number of blocks."""
QUEUE_BYTES = 16
"""Bytes of `BLOCK_BYTES` reserved for policies, which may grow before hashes are fitted again."""

# No block is before the first chunk of a sequence. There `Chain.header` takes the digest's place.
Key = tuple[int, bytes, bytes]
"""The number of a chunk's first block, the digest of the block before it, and the chunk's tokens."""


class RememberedHashes:
    """An LRU dictionary of chunks of prompts, up to `capacity` bytes.

    An entry has the digests of the chunk's blocks and the state of the hasher behind them. A lookup touches a prompt's
    first chunk last, so that this chunk is evicted last: without it, later chunks cannot be found.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[Key, tuple[Key, bytes, Any, int]] = OrderedDict()
        self.capacity = self.nbytes = 0

    def fit(self, num_blocks: int, taken: int) -> None:
        """Set the capacity: the bytes allowed for the bookkeeping of `num_blocks` blocks, less `taken`.

        `taken` is the number of bytes that pools and policies use.
        """
        self.capacity = max(BASE_BYTES + (BLOCK_BYTES - QUEUE_BYTES) * num_blocks - taken, 0)

    def begin(self, chain: Chain, data: bytes, end: int) -> bytes:
        """Return the digests of the first `end` blocks, whose tokens are `data`, and let the chain continue there.

        This replaces `BlockHasher.begin`. Only blocks behind the remembered chunks are hashed.
        """
        chunks, width, walked, digests = self._chunks, len(data) // max(end, 1), list[Key](), list[bytes]()
        block, before, hasher, fed = 0, chain.header, chain.start, False
        while block < end:
            # Chunks are short at the start, where prompts branch, and long later.
            reach = block + (16 if block < 64 else 64 if block < 256 else 128 if block < 1024 else 256)
            key = (block, before, data[block * width : reach * width])
            entry = chunks.get(key) if reach <= end and not fed else None
            if entry is not None:
                key, hashes, hasher, _ = entry
            else:
                if not fed:
                    chain.hasher, chain.hashed, fed = hasher.copy(), block, True
                hashes = chain.feed(key[2])
                if reach <= end:
                    nbytes = len(before) + len(key[2]) + len(hashes) + OVERHEAD
                    chunks[key] = key, hashes, chain.hasher.copy(), nbytes
                    self.nbytes += nbytes
            if reach <= end:
                walked.append(key)
                before = hashes[-len(hashes) // (reach - block) :]
            digests.append(hashes)
            block = reach
        if not fed:
            chain.hasher, chain.hashed = hasher.copy(), end
        for key in reversed(walked):
            chunks.move_to_end(key)
        while self.nbytes > self.capacity and chunks:
            self.nbytes -= chunks.popitem(last=False)[1][3]
        return b"".join(digests)
