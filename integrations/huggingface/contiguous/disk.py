"""Blocks of keys and values on disk, by hash: they outlive the process, and only the same model reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ....cache import CacheManager
from ....cache.disk import DiskTier
from ....cache.tier import Layout
from ....cache.tier_writer import TierWriter
from .fingerprint import fingerprint
from .storage import BlockStorage

Content = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of one block by layer, `[num_heads, block_size, width]` each."""
SIDES = ("keys", "values")


class DiskBlocks:
    """Contents of blocks in a directory.

    Args:
        tier: Where they are; a thread writes to it.
    """

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._writer = TierWriter(tier)

    def get(self, digest: bytes) -> Content | None:
        """A block's content."""
        tensors = self._writer.get(digest)
        if tensors is None:
            return None
        layers = sorted({int(name.partition(" ")[0]) for name in tensors})
        return {layer: (tensors[f"{layer} keys"], tensors[f"{layer} values"]) for layer in layers}

    def holds(self, digest: bytes) -> bool:
        """Whether a block is there, or will be."""
        return digest in self._writer

    def put(self, digest: bytes, content: Content) -> None:
        """Takes a block to be written."""
        self._writer.put(digest, _named(content))

    def close(self, rest: Iterable[tuple[bytes, Content]]) -> None:
        """Waits for what is being written, and writes the rest."""
        self._writer.close()
        for digest, content in rest:
            self._tier.put(digest, _named(content))


def disk_blocks(
    model: Any, manager: CacheManager, storage: BlockStorage, path: str | os.PathLike[str], max_bytes: int | None
) -> DiskBlocks:
    """The blocks of this model, with these weights, in a directory.

    Raises:
        OSError: It cannot be made.
    """
    shapes = {
        f"{index} {side}": ((spec.num_heads, storage.block_size, spec.width), spec.dtype)
        for index, specs in storage.specs.items()
        for side, spec in zip(SIDES, specs, strict=True)
    }
    identity = f"{fingerprint(model)} {manager.hash_algorithm} {manager.seed}"
    return DiskBlocks(DiskTier(Path(path), Layout(identity, shapes), max_bytes))


def _named(content: Content) -> dict[str, torch.Tensor]:
    return {
        f"{layer} {side}": tensor for layer, pair in content.items() for side, tensor in zip(SIDES, pair, strict=True)
    }
