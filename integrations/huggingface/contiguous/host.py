"""Blocks that were evicted, or loaded from a file, in host memory: found by hash when a prompt asks for them again."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import torch

from .storage import BlockStorage

Content = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of one block by layer, `[num_heads, block_size, width]` each."""


class HostBlocks:
    """Contents of blocks by hash; the one used longest ago goes first.

    Args:
        storage: Whose blocks they were.
        max_blocks: How many are kept.
    """

    def __init__(self, storage: BlockStorage, max_blocks: int) -> None:
        self.max_blocks = max_blocks
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

    def put(self, digest: bytes, content: Content) -> None:
        """Keeps a block's content, and drops the one used longest ago where there is no room."""
        with self._lock:
            self._blocks[digest] = content
            self._blocks.move_to_end(digest)
            while len(self._blocks) > self.max_blocks:
                self._blocks.popitem(last=False)

    def evicted(self, group: int, blocks: np.ndarray, digests: list[bytes]) -> None:
        """Called by the manager with blocks that are about to lose their content."""
        for block, digest in zip(blocks.tolist(), digests, strict=True):
            self.put(digest, self._storage.content(block))
