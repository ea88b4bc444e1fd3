"""Reuse of a part of a block: a prompt copies the tokens that it has in common with a cached block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ..hashing import Words, split_digests
from ..lookup import Hit
from ..pool import BlockPool
from ..request import Request
from ..runs import Span
from .content import common_length

CANDIDATES = 32
"""Maximum number of blocks that are compared after one prefix, the latest first. Popular prefixes have many."""
ENTRY_BYTES = 400
"""Bytes of an entry besides its tokens."""


class PartialBlocks:
    """An index (see `pc.cache.reuse`) of the tokens of published blocks by the prefix before each block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool, self._block_size = pool, pool.hasher.block_size
        self._behind: dict[bytes, dict[bytes, array[int]]] = {}
        self._parent_of: dict[bytes, bytes] = {}

    @property
    def nbytes(self) -> int:
        """Approximate number of bytes held."""
        return len(self._parent_of) * (ENTRY_BYTES + 4 * self._block_size)

    def published(self, request: Request, first: int, last: int) -> None:
        """Add blocks that are not in the index yet."""
        parent, size = request.namespace, self._block_size
        if parent is None:
            return
        table = request.tables[0]
        if first:
            parent = self._pool.words[table.item(first - 1)].tobytes()
        for block, block_hash in enumerate(self._pool.digests_of(table[first:last]), first):
            if block_hash not in self._parent_of:
                tokens = request.tokens[block * size : (block + 1) * size]
                self._behind.setdefault(parent, {})[block_hash] = tokens
                self._parent_of[block_hash] = parent
            parent = block_hash

    def removed(self, words: Words) -> None:
        """Remove blocks from the index."""
        for block_hash in split_digests(words):
            parent = self._parent_of.get(block_hash)
            children = self._behind.get(parent, {}) if parent is not None else {}
            children.pop(block_hash, None)
            if parent is not None and not children:
                self._behind.pop(parent, None)
            self._parent_of.pop(block_hash, None)

    def extend(self, request: Request, hit: Hit, reuse: str, segments: Sequence[Span] | None) -> Hit:
        """Return the hit, extended by the tokens that its first fresh block has in common with a cached block.

        The hit is not extended if blocks are loaded from the host, because a copy must not overwrite them. It is not
        extended either if pinning the cached block would leave too few blocks for the fresh ones.
        """
        (part,), namespace, size, pool = hit.groups, request.namespace, self._block_size, self._pool
        behind_a_gap = hit.cached and hit.cached[-1][1] > hit.position
        if namespace is None or behind_a_gap or part.slots or not part.fresh.size:
            return hit
        start, whole = hit.blocks * size, len(request.tokens)
        end = min(hit.num_tokens if hit.num_tokens < whole else whole - 1, start + size)
        parent = request.digests[hit.blocks - 1].tobytes() if hit.blocks else namespace
        block_hash, common = self.longest(parent, request.tokens[start:end])
        if block_hash is None:
            return hit
        source = pool.table.find(np.frombuffer(block_hash, np.uint64)[None])
        available = pool.available - pool.unreferenced(np.concatenate((part.held, source)))
        if source[0] < 0 or part.fresh.size > available:
            return hit
        reached = start + common
        return hit._replace(position=reached, cached=[(0, reached)], committed=reached, borrowed=source, copied=common)

    def longest(self, parent: bytes, tokens: array[int]) -> tuple[bytes | None, int]:
        """Find the block after a prefix that has the most first tokens in common with `tokens`.

        Return its hash and the number of common tokens; None and 0 if no block has the first token.
        """
        best: tuple[bytes | None, int] = (None, 0)
        asked = np.frombuffer(tokens, np.uint32) if tokens else np.empty(0, np.uint32)
        children = self._behind.get(parent, {})
        for _, (block_hash, known) in zip(range(CANDIDATES), reversed(children.items()), strict=False):
            common = common_length(asked, np.frombuffer(known, np.uint32))
            if common > best[1]:
                best = (block_hash, common)
        return best
