"""Blocks of keys and values, head by head: contiguous rows are written to them and read from them in whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class TokenSpec:
    """What one layer keeps of a token as its keys, or as its values."""

    num_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return self.num_heads * self.width * self.dtype.itemsize

    def empty(self, rows: int, tokens: int) -> torch.Tensor:
        """`[rows, num_heads, tokens, width]`, not filled."""
        return torch.empty(rows, self.num_heads, tokens, self.width, dtype=self.dtype, device=self.device)


SIDES = ("keys", "values")

Specs = dict[int, tuple[TokenSpec, TokenSpec]]
"""Of each attention layer its keys and its values."""

Content = dict[str, torch.Tensor]
"""What one block holds, by layer and side: "3 keys", "3 values"."""

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of a content."""


class BlockIds:
    """Blocks that are read or written, looked at once for all layers.

    Args:
        blocks: Block numbers, `[n]`, n at least 1.
    """

    def __init__(self, blocks: np.ndarray) -> None:
        self.count = len(blocks)
        first, last = int(blocks[0]), int(blocks[-1])
        alike = last - first + 1 == self.count and bool((np.diff(blocks) == 1).all())
        self.run = slice(first, last + 1) if alike else None
        self._index = torch.from_numpy(blocks.astype(np.int64))

    def index(self, device: torch.device) -> torch.Tensor:
        """The numbers on a device."""
        return self._index.to(device)


class BlockStorage:
    """Blocks of every layer, `[num_blocks, num_heads, block_size, width]` for keys and for values.

    Keys and values may differ in width, and layers in everything. Memory is taken when a layer is first written.

    Args:
        num_blocks: Blocks of each layer.
        block_size: Tokens of a block.
        specs: What the layers keep.
    """

    def __init__(self, num_blocks: int, block_size: int, specs: Specs) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.specs = specs
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fresh(self) -> BlockStorage:
        """Blocks of the same layers without content."""
        return BlockStorage(self.num_blocks, self.block_size, self.specs)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * sum(k.nbytes + v.nbytes for k, v in self.specs.values())

    @property
    def shapes(self) -> Shapes:
        """Of the content of a block."""
        return {
            f"{index} {side}": ((spec.num_heads, self.block_size, spec.width), spec.dtype)
            for index, specs in self.specs.items()
            for side, spec in zip(SIDES, specs, strict=True)
        }

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of a layer."""
        found = self.layers.get(index)
        if found is None:
            # What is made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                keys, values = (spec.empty(self.num_blocks, self.block_size) for spec in self.specs[index])
            found = self.layers.setdefault(index, (keys, values))  # another thread may have been first
        return found

    def write(self, index: int, blocks: BlockIds, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes whole blocks.

        Args:
            index: Which layer.
            blocks: n of them.
            keys: `[num_heads, n * block_size, width]`.
            values: Likewise, of their own width.
        """
        for cache, new in zip(self.layer(index), (keys, values), strict=True):
            source = new.view(new.shape[0], blocks.count, self.block_size, new.shape[2]).transpose(0, 1)
            if blocks.run is not None:
                cache[blocks.run].copy_(source)
            else:
                cache.index_copy_(0, blocks.index(cache.device), source)

    def content(self, block: int) -> Content:
        """Copies of one block's keys and values by layer, `[num_heads, block_size, width]`, in host memory."""
        return {
            f"{index} {side}": cache[block].to("cpu", copy=True)
            for index, pair in self.layers.items()
            for side, cache in zip(SIDES, pair, strict=True)
        }

    def put(self, block: int, content: Content) -> None:
        """Fills a block with what `content` gave."""
        for index in self.specs:
            for side, cache in zip(SIDES, self.layer(index), strict=True):
                cache[block].copy_(content[f"{index} {side}"])

    def read(self, index: int, blocks: BlockIds, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Reads the first tokens of blocks into `keys` and `values`, `[num_heads, num_tokens, width]`.

        Args:
            index: Which layer.
            blocks: As many as the tokens need.
            keys: Written to.
            values: Written to.
        """
        for cache, out in zip(self.layer(index), (keys, values), strict=True):
            found = cache[blocks.run] if blocks.run is not None else cache.index_select(0, blocks.index(cache.device))
            whole = out.shape[1] // self.block_size
            head = out[:, : whole * self.block_size].view(out.shape[0], whole, self.block_size, out.shape[2])
            head.copy_(found[:whole].transpose(0, 1))
            if whole < blocks.count:
                out[:, whole * self.block_size :] = found[whole, :, : out.shape[1] - whole * self.block_size]
