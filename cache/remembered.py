"""Hashes of earlier prompts, so that a prompt that begins with the same tokens is not hashed again.

Without them results are the same, only slower: `BlockHasher.begin` then hashes every block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .hashing import Chain

OVERHEAD = 1000
"""Bytes of an entry besides its tokens and digests: objects, the dictionary and the state of a hasher."""
BLOCK_BYTES = 64
"""Bytes of remembered chunks for each block of a manager."""
BASE_BYTES = 1 << 18
"""Additional bytes of remembered chunks, for any number of blocks."""

Key = tuple[bytes, bytes]
"""The digest before a chunk, and the tokens of the chunk's last block."""


class RememberedHashes:
    """An LRU dictionary of chunks of prompts, up to `capacity` bytes.

    An entry has the chunk's tokens, the digests of its blocks and the state of the hasher after them. The key has only
    a part of the tokens, because Python hashes all bytes of a key. The other tokens are compared, which is faster. A
    chunk with the key of another chunk replaces it.

    A lookup touches a prompt's first chunk last, so that this chunk is evicted last: without it, later chunks cannot be
    found.
    """

    def __init__(self, num_blocks: int) -> None:
        self._chunks: OrderedDict[Key, tuple[bytes, bytes, Any, int]] = OrderedDict()
        self.capacity, self.nbytes = BASE_BYTES + BLOCK_BYTES * num_blocks, 0

    def begin(self, chain: Chain, data: bytes, end: int) -> bytes:
        """Return the digests of the first `end` blocks, whose tokens are `data`, and let the chain continue there.

        This replaces `BlockHasher.begin`. Only blocks after the remembered chunks are hashed.
        """
        chunks, width = self._chunks, len(data) // max(end, 1)
        walked: list[Key] = []
        digests: list[bytes] = []
        block, before, hasher, fed = 0, chain.start.digest(), chain.start, False
        while block < end:
            # Chunks are short at the start, where prompts branch, and long later.
            reach = block + (16 if block < 64 else 64 if block < 256 else 128 if block < 1024 else 256)
            first, behind = block * width, reach * width
            key = before, data[behind - width : behind]
            entry = chunks.get(key) if reach <= end and not fed else None
            if entry is not None and data.startswith(entry[0], first):
                _, hashes, hasher, _ = entry
            else:
                if not fed:
                    chain.hasher, chain.hashed, fed = hasher.copy(), block, True
                piece = data[first:behind]
                hashes = chain.feed(piece)
                if reach <= end:
                    nbytes = len(before) + len(piece) + len(hashes) + OVERHEAD
                    self.nbytes += nbytes if key not in chunks else 0
                    chunks[key] = piece, hashes, chain.hasher.copy(), nbytes
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
