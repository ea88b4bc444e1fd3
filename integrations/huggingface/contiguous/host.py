"""Blocks that were evicted, or loaded from a file, in host memory: found by hash when a prompt asks for them again."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from ..store import AnyManager
from .disk import DiskBlocks
from .grouped import GroupedStorage
from .storage import Content


class HostBlocks:
    """Contents of blocks by hash, group by group; the one used longest ago goes first.

    Args:
        storage: Whose blocks they were.
        max_blocks: How many of each group are kept.
        disk: Where evicted blocks go too; None: nowhere.
    """

    def __init__(self, storage: GroupedStorage, max_blocks: int, disk: DiskBlocks | None = None) -> None:
        self.max_blocks = max_blocks
        self._disk = disk
        self._storage = storage
        self._blocks: list[OrderedDict[bytes, Content]] = [OrderedDict() for _ in storage.parts]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def items(self, group: int) -> list[tuple[bytes, Content]]:
        """All blocks of a group with their hashes."""
        with self._lock:
            return list(self._blocks[group].items())

    def get(self, group: int, digest: bytes) -> Content | None:
        """A block's content; nobody writes to it."""
        with self._lock:
            content = self._blocks[group].get(digest)
            if content is not None:
                self._blocks[group].move_to_end(digest)
                return content
        return None if self._disk is None else self._disk.get(group, digest)

    def put(self, group: int, digest: bytes, content: Content) -> None:
        """Keeps a block's content, and drops the one used longest ago where there is no room."""
        with self._lock:
            blocks = self._blocks[group]
            blocks[digest] = content
            blocks.move_to_end(digest)
            while len(blocks) > self.max_blocks:
                blocks.popitem(last=False)
        if self._disk is not None:
            self._disk.put(group, digest, content)

    def evicted(self, group: int, blocks: np.ndarray, digests: list[bytes]) -> list[bytes]:
        """Called by the manager with blocks that are about to lose their content; gives the hashes of those kept."""
        kept = []
        for block, digest in zip(blocks.tolist(), digests, strict=True):
            self.put(group, digest, self._storage.content(group, block))
            if self.max_blocks or (self._disk is not None and self._disk.holds(group, digest)):
                kept.append(digest)
        return kept

    def close(self, manager: AnyManager) -> None:
        """Writes what a manager still has to disk, where there is one."""
        if self._disk is not None:
            self._disk.close(
                (group, digest, self._storage.content(group, block))
                for group in range(len(manager.pools))
                for digest, block in findable(manager, group)
            )


def findable(manager: AnyManager, group: int) -> list[tuple[bytes, int]]:
    """The blocks of a group that prompts can find, with their hashes."""
    pool = manager.pools[group]
    return [(pool.words[b].tobytes(), b) for b in range(pool.num_blocks) if pool.table.lists(b)]
