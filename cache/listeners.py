"""Whoever hears that blocks become findable or cease to be: listeners, a lower tier, the index of block beginnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .hashing import Words
from .partial_reuse import PartialIndex
from .pool import EMPTY, BlockPool
from .request import Request
from .runs import find_runs
from .table import Ids


class Listener(Protocol):
    """Hears of every block that becomes findable or ceases to be; called under the manager's lock."""

    def stored(
        self, group: int, hashes: list[bytes], parent: bytes | None, token_ids: list[int], extra_keys: Any
    ) -> None:
        """A run of blocks of one sequence became findable; `parent` is the hash of the block before, if any."""

    def removed(self, group: int, hashes: list[bytes]) -> None:
        """Blocks are about to lose their content."""

    def cleared(self) -> None:
        """The manager was reset."""


class Listeners:
    """Passes on what happens to blocks.

    Attributes:
        listeners: See `Listener`.
        on_evict: Called with (group, blocks, hashes) before blocks lose their content.
        partial: The beginnings of findable blocks, None without partial reuse.

    Args:
        block_size: Tokens a block.
        partial_reuse: Whether to keep `partial`.
    """

    def __init__(self, block_size: int, partial_reuse: bool) -> None:
        self.listeners: list[Listener] = []
        self.on_evict: Callable[[int, Ids, list[bytes]], None] | None = None
        self.partial = PartialIndex(block_size) if partial_reuse else None
        self._block_size = block_size

    @property
    def want_stored(self) -> bool:
        """Whether anyone is to hear of blocks that become findable."""
        return bool(self.listeners) or self.partial is not None

    def stored(self, group: int, pool: BlockPool, request: Request, blocks: npt.NDArray[np.intp]) -> None:
        """The logical blocks of a request that became findable."""
        table, size = request.tables[group], self._block_size
        for _, start, end in find_runs(blocks):
            parent = pool.digests_of(table[start - 1 : start])[0] if start and table[start - 1] >= 0 else None
            hashes = pool.digests_of(table[start:end])
            for listener in self.listeners:
                tokens = request.tokens[start * size : end * size].tolist()
                listener.stored(group, hashes, parent, tokens, request.keys[0])
        self._index(pool, request, blocks)

    def _index(self, pool: BlockPool, request: Request, blocks: npt.NDArray[np.intp]) -> None:
        root = request.chain.root if request.chain is not None else None
        if self.partial is None or root is None:
            return
        table, size = request.tables[0], self._block_size
        for block in blocks.tolist():
            parent = pool.digests_of(table[block - 1 : block])[0] if block else root
            own = pool.digests_of(table[block : block + 1])[0]
            self.partial.add(parent, own, request.tokens[block * size : (block + 1) * size])

    def begins_alike(self, pool: BlockPool, request: Request, digests: Words, hit: int) -> tuple[Ids, int]:
        """A cached block that begins as the prompt goes on behind `hit` blocks, and how many tokens they share."""
        root, start = request.chain.root if request.chain is not None else None, hit * self._block_size
        if self.partial is None or root is None:
            return EMPTY, 0
        parent = digests[hit - 1].tobytes() if hit else root
        end = min(start + self._block_size, len(request.tokens) - 1)
        block_hash, common = self.partial.longest(parent, request.tokens[start:end])
        if block_hash is None:
            return EMPTY, 0
        ids = pool.table.find(np.frombuffer(block_hash, np.uint64)[None])
        return (ids, common) if ids[0] >= 0 else (EMPTY, 0)

    def evicted(self, group: int, pool: BlockPool, ids: Ids) -> None:
        """Blocks of a pool are about to lose their content."""
        if self.on_evict is None and not self.listeners and self.partial is None:
            return
        hashes = pool.digests_of(ids)
        if self.partial is not None:
            self.partial.remove(hashes)
        if self.on_evict is not None:
            self.on_evict(group, ids, hashes)
        for listener in self.listeners:
            listener.removed(group, hashes)

    def cleared(self) -> None:
        """The manager was reset."""
        if self.partial is not None:
            self.partial.clear()
        for listener in self.listeners:
            listener.cleared()
