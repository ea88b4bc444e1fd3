"""Blocks on disk by hash, of keys and values or of states: they outlive the process, for the same model only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ....cache.disk import DiskTier
from ....cache.tier import Layout
from ....cache.tier_writer import TierWriter
from ..store import AnyManager
from .fingerprint import fingerprint
from .grouped import GroupedStorage
from .storage import Content


class DiskBlocks:
    """Contents of blocks in a directory.

    Args:
        tiers: Where those of each group are; a thread writes to each.
    """

    def __init__(self, tiers: list[DiskTier]) -> None:
        self._tiers = tiers
        self._writers = [TierWriter(tier) for tier in tiers]

    def get(self, group: int, digest: bytes) -> Content | None:
        """A block's content."""
        tensors = self._writers[group].get(digest)
        return None if tensors is None else dict(tensors)

    def holds(self, group: int, digest: bytes) -> bool:
        """Whether a block is there, or will be."""
        return digest in self._writers[group]

    def put(self, group: int, digest: bytes, content: Content) -> None:
        """Takes a block to be written."""
        self._writers[group].put(digest, content)

    def close(self, rest: Iterable[tuple[int, bytes, Content]]) -> None:
        """Waits for what is being written, and writes the rest."""
        for writer in self._writers:
            writer.close()
        for group, digest, content in rest:
            self._tiers[group].put(digest, content)


def disk_blocks(
    model: Any, manager: AnyManager, storage: GroupedStorage, path: str | os.PathLike[str], max_bytes: int | None
) -> DiskBlocks:
    """The blocks of this model, with these weights, in a directory; groups share the bytes as they do memory.

    Raises:
        OSError: It cannot be made.
    """
    identity = f"{fingerprint(model)} {manager.hash_algorithm} {manager.seed}"
    sizes = [part.num_blocks * part.bytes_per_block for part in storage.parts]
    limits = [None if max_bytes is None else max(1, max_bytes * size // max(sum(sizes), 1)) for size in sizes]
    return DiskBlocks(
        [
            DiskTier(Path(path), Layout(identity, part.shapes), limit)
            for part, limit in zip(storage.parts, limits, strict=True)
        ]
    )
