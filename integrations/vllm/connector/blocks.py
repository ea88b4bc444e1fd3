"""A worker's half of a connector: bytes of blocks between vLLM's cache and a tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ....cache.tier import Tier
from .plans import Blocks


class BlockStore:
    """Blocks of all layers, as one row of bytes each.

    Args:
        caches: By layer, vLLM's `[num_blocks, ...]` in any layout.
        nbytes: Bytes of a block, as the scheduler takes them to be.

    Raises:
        ValueError: Caches of other sizes.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], nbytes: int) -> None:
        self.caches = [caches[name] for name in sorted(caches)]
        sizes = [cache[0].numel() * cache.element_size() for cache in self.caches]
        if sum(sizes) != nbytes:
            raise ValueError(f"kv_caches: got {sum(sizes)} bytes a block, needs {nbytes}: a layout that is not served")
        self._parts = [(sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(len(sizes))]
        self.nbytes = nbytes
        self._pin = any(cache.is_cuda for cache in self.caches)

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The bytes of blocks, `[len(ids), nbytes]` in host memory."""
        rows = torch.empty(len(ids), self.nbytes, dtype=torch.uint8, pin_memory=self._pin)
        for cache, (begin, end) in zip(self.caches, self._parts, strict=True):
            found = cache.index_select(0, torch.tensor(ids, device=cache.device))
            rows[:, begin:end].copy_(found.reshape(len(ids), -1).view(torch.uint8), non_blocking=True)
        if self._pin:
            torch.cuda.current_stream().synchronize()
        return rows

    def write(self, ids: Sequence[int], rows: torch.Tensor) -> None:
        """Puts bytes into blocks.

        Args:
            ids: Numbers of the blocks.
            rows: `[len(ids), nbytes]` in host memory.
        """
        for cache, (begin, end) in zip(self.caches, self._parts, strict=True):
            values = rows[:, begin:end].contiguous().to(cache.device).view(cache.dtype)
            index = torch.tensor(ids, device=cache.device)
            cache.index_copy_(0, index, values.reshape(len(ids), *cache.shape[1:]))

    def load(self, tier: Tier, wanted: Blocks) -> list[int]:
        """Fills blocks from a tier; those that it has lost, and all behind them, are returned and left alone."""
        found = tier.get_many(wanted.keys)
        count = next((n for n, tensors in enumerate(found) if tensors is None), len(found))
        if count:
            self.write(wanted.ids[:count], torch.stack([tensors["kv"] for tensors in found[:count] if tensors]))
        return wanted.ids[count:]

    def save(self, tier: Tier, blocks: Sequence[Blocks]) -> None:
        """Puts blocks into a tier that does not have them."""
        keys = [key for each in blocks for key in each.keys]
        ids = [block for each in blocks for block in each.ids]
        missing = [n for n, there in enumerate(tier.contains_many(keys)) if not there]
        if missing:
            rows = self.read([ids[n] for n in missing])
            tier.put_many({keys[n]: {"kv": row} for n, row in zip(missing, rows, strict=True)})
