"""A tier in host memory, which keeps the most recently used blocks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

import torch

from ...triton_ops._core.checks import check_integer
from ..forks import repair_after_fork
from .payload import host_copy
from .tier import Tensors, Tier, check_entries, check_key


class MemoryTier(Tier):
    """The most recently used blocks, in host memory. Thread-safe.

    Args:
        max_blocks: Maximum number of blocks. The least recently used are evicted. 0: no block is kept.

    Raises:
        TypeError: `max_blocks` is not an int.
        ValueError: `max_blocks` is below 0.

    Examples:
        >>> from pc.cache.tiers.memory import MemoryTier
        >>> tier = MemoryTier(max_blocks=2)
        >>> for key in (b"a", b"b", b"c"):
        ...     taken = tier.put(key, {"key": torch.ones(16, 2, 64)})
        >>> b"a" in tier, tier.get(b"c")["key"].shape
        (False, torch.Size([16, 2, 64]))
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = check_integer("max_blocks", max_blocks, 0)
        self._blocks: OrderedDict[bytes, dict[str, torch.Tensor]] = OrderedDict()
        self._after_fork()
        repair_after_fork(self)

    def _after_fork(self) -> None:
        """Take a new lock, because a thread that a child process lacks may have held the old one."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object, /) -> bool:
        return isinstance(key, bytes) and key in self._blocks

    def keys(self) -> list[bytes]:
        """Return the keys of all blocks, the least recently used first."""
        with self._lock:
            return list(self._blocks)

    def put_many(self, entries: Mapping[bytes, Tensors]) -> set[bytes]:
        """Store several blocks in place of the least recently used; see `Tier.put_many`."""
        check_entries(entries, None)
        copies = {key: host_copy(tensors) for key, tensors in entries.items() if self.max_blocks}
        with self._lock:
            for key, copy in copies.items():
                self._blocks[key] = copy
                self._blocks.move_to_end(key)
            while len(self._blocks) > self.max_blocks:
                self._blocks.popitem(last=False)
            return {key for key in copies if key in self._blocks}

    def get(self, key: bytes) -> dict[str, torch.Tensor] | None:
        """Return a copy of a block's tensors and mark the block as recently used; see `Tier.get`."""
        check_key(key)
        with self._lock:
            tensors = self._blocks.get(key)
            if tensors is None:
                return None
            self._blocks.move_to_end(key)
        return host_copy(tensors)

    def discard(self, key: bytes) -> None:
        """Remove a block, if it exists."""
        check_key(key)
        with self._lock:
            self._blocks.pop(key, None)
