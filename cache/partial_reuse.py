"""Blocks that begin as a prompt goes on: the part they have in common can be copied instead of computed."""

from __future__ import annotations

from array import array

import numpy as np

from .pool import BlockPool
from .request import Request
from .table import Ids

CANDIDATES = 32
"""Blocks looked at behind one prefix, the latest first: a bound on the cost of popular prefixes."""


class PartialIndex:
    """The tokens of findable blocks, by what comes before them.

    Args:
        block_size: Tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._behind: dict[bytes, dict[bytes, array[int]]] = {}
        self._parent_of: dict[bytes, bytes] = {}

    def add(self, request: Request, block: int, parent: bytes | None, block_hash: bytes) -> None:
        """A logical block of a request became findable behind the block `parent`, None for the first."""
        root = request.chain.root if request.chain is not None else None
        if root is not None:
            parent, size = parent or root, self._block_size
            self._behind.setdefault(parent, {})[block_hash] = request.tokens[block * size : (block + 1) * size]
            self._parent_of[block_hash] = parent

    def remove(self, hashes: list[bytes]) -> None:
        """Blocks are not findable any more."""
        for block_hash in hashes:
            parent = self._parent_of.pop(block_hash, None)
            if parent is not None:
                children = self._behind[parent]
                del children[block_hash]
                if not children:
                    del self._behind[parent]

    def clear(self) -> None:
        """Forgets everything."""
        self._behind.clear()
        self._parent_of.clear()

    def find(self, pool: BlockPool, request: Request, hit: int, end: int) -> tuple[Ids | None, int]:
        """A cached block that begins as the tokens of a request behind `hit` blocks do, and how many they share.

        Args:
            pool: Of the one group.
            request: Its tokens, hashes and chain.
            hit: Leading blocks that are cached.
            end: Tokens to be taken from there on at most, counted from the start.
        """
        root = request.chain.root if request.chain is not None else None
        start = hit * self._block_size
        if root is None or end <= start:
            return None, 0
        parent = request.digests[hit - 1].tobytes() if hit else root
        block_hash, common = self.longest(parent, request.tokens[start : min(end, start + self._block_size)])
        if block_hash is None:
            return None, 0
        ids = pool.table.find(np.frombuffer(block_hash, np.uint64)[None])
        return (ids, common) if ids[0] >= 0 else (None, 0)

    def longest(self, parent: bytes, tokens: array[int]) -> tuple[bytes | None, int]:
        """The block behind a prefix that has the most leading tokens in common with `tokens`, and how many."""
        best: tuple[bytes | None, int] = (None, 0)
        asked = np.frombuffer(tokens, np.uint32) if tokens else np.empty(0, np.uint32)
        children = self._behind.get(parent, {})
        for _, (block_hash, known) in zip(range(CANDIDATES), reversed(children.items()), strict=False):
            differs = np.frombuffer(known, np.uint32)[: asked.size] != asked
            common = int(differs.argmax()) if differs.any() else asked.size
            if common > best[1]:
                best = (block_hash, common)
        return best
