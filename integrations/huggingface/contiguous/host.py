"""Blocks that were evicted, or loaded from a file, in host memory: found by hash when a prompt asks for them again."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from ....cache import CacheManager
from .disk import Content, DiskBlocks
from .storage import BlockStorage


class HostBlocks:
    """Contents of blocks by hash; the one used longest ago goes first.

    Args:
        storage: Whose blocks they were.
        max_blocks: How many are kept.
        disk: Where evicted blocks go too; None: nowhere.
    """

    def __init__(self, storage: BlockStorage, max_blocks: int, disk: DiskBlocks | None = None) -> None:
        self.max_blocks = max_blocks
        self._disk = disk
        self._storage = storage
        self._blocks: OrderedDict[bytes, Content] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def items(self) -> list[tuple[bytes, Content]]:
        """All blocks with their hashes."""
        with self._lock:
            return list(self._blocks.items())

    def get(self, digest: bytes) -> Content | None:
        """A block's content; nobody writes to it."""
        with self._lock:
            content = self._blocks.get(digest)
            if content is not None:
                self._blocks.move_to_end(digest)
                return content
        return None if self._disk is None else self._disk.get(digest)

    def put(self, digest: bytes, content: Content) -> None:
        """Keeps a block's content, and drops the one used longest ago where there is no room."""
        with self._lock:
            self._blocks[digest] = content
            self._blocks.move_to_end(digest)
            while len(self._blocks) > self.max_blocks:
                self._blocks.popitem(last=False)
        if self._disk is not None:
            self._disk.put(digest, content)

    def evicted(self, group: int, blocks: np.ndarray, digests: list[bytes]) -> list[bytes]:
        """Called by the manager with blocks that are about to lose their content; gives the hashes of those kept."""
        kept = []
        for block, digest in zip(blocks.tolist(), digests, strict=True):
            content = self._storage.content(block)
            self.put(digest, content)
            if self.max_blocks or (self._disk is not None and self._disk.holds(digest)):
                kept.append(digest)
        return kept

    def close(self, manager: CacheManager) -> None:
        """Writes what a manager still has to disk, where there is one."""
        if self._disk is not None:
            pool = manager.pools[0]
            listed = (b for b in range(pool.num_blocks) if self._storage.layers and pool.table.lists(b))
            self._disk.close((pool.words[b].tobytes(), self._storage.content(b)) for b in listed)
