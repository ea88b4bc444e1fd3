"""Reading a paged cache on the CPU, and PyTorch's flash kernel over what was read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Cache:
    """Keys and values of a call, read as tensors of `dtype`."""

    key: torch.Tensor
    value: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    dtype: torch.dtype  # what the keys and values are read as

    @property
    def block_size(self) -> int:
        return self.key.shape[1]

    @property
    def width(self) -> int:
        """head_dim of the values, and so of the result."""
        return self.value.shape[3]

    @property
    def token_bytes(self) -> int:
        """Size of one token's keys as they are read."""
        return self.key.shape[2] * self.key.shape[3] * self.dtype.itemsize

    def read(self, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, num_kv_heads, head_dim]` of blocks; views where the blocks are adjacent."""
        index = None if adjacent(blocks) else torch.from_numpy(blocks.astype(np.int64))
        first, end = int(blocks[0]), int(blocks[0]) + len(blocks)
        key, value = (
            (cache[first:end] if index is None else cache.index_select(0, index)).flatten(0, 1)
            for cache in (self.key, self.value)
        )
        return self._dequantized(key, self.k_scale), self._dequantized(value, self.v_scale)

    def read_rows(
        self, blocks: np.ndarray, heads: np.ndarray, slots: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[rows, tokens, head_dim]` of blocks `[rows, n]`, one KV head a row.

        Args:
            blocks: Block numbers.
            heads: `[rows]`, the KV head of each.
            slots: `[rows, n, block_size]`, slots of the blocks; None: all of each in their order.
        """
        found: list[torch.Tensor] = []
        index, made_for = np.empty(0), None
        for cache, scale in ((self.key, self.k_scale), (self.value, self.v_scale)):
            matrix, strides = _as_rows(cache)
            if strides != made_for:
                offsets = (np.arange(self.block_size) if slots is None else slots) * strides[1]
                index = ((blocks * strides[0] + heads[:, None] * strides[2])[:, :, None] + offsets).reshape(-1)
                made_for = strides
            rows = _take(matrix, index).view(len(blocks), -1, cache.shape[3])
            if scale is not None:
                own = scale.to(torch.float32).expand(cache.shape[2])[torch.from_numpy(heads)].view(-1, 1, 1)
                rows = rows.to(torch.float32).mul_(own)
            found.append(rows.to(self.dtype))
        return found[0], found[1]

    def _dequantized(self, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return rows.to(self.dtype)
        return rows.to(torch.float32).mul_(scale.to(torch.float32).view(-1, 1)).to(self.dtype)


def _as_rows(cache: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """A cache as a matrix of rows of head_dim, and how many of its rows lie between blocks, slots and heads."""
    strides = [stride if size > 1 else 0 for stride, size in zip(cache.stride()[:3], cache.shape[:3], strict=True)]
    step, width = math.gcd(*strides), cache.shape[3]
    if step % width == 0:
        step = width
    last = sum(stride * (size - 1) for stride, size in zip(strides, cache.shape[:3], strict=True))
    return cache.as_strided((last // step + 1, width), (step, 1)), [stride // step for stride in strides]


def _take(matrix: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """Rows of a matrix; numpy's take needs two thirds of the time of torch's index_select."""
    if not matrix.is_contiguous():
        return matrix.index_select(0, torch.from_numpy(index))
    out = matrix.new_empty((len(index), matrix.shape[1]))
    np.take(matrix.view(torch.uint8).numpy(), index, axis=0, out=out.view(torch.uint8).numpy(), mode="clip")
    return out


def adjacent(blocks: np.ndarray) -> bool:
    """Whether the blocks are present and follow each other in memory."""
    return (
        int(blocks[0]) >= 0
        and int(blocks[-1]) - int(blocks[0]) == len(blocks) - 1
        and bool((np.diff(blocks) == 1).all())
    )


def flash_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's flash kernel for CPUs, which takes keys and values of one width: the narrower ones are padded."""
    if scale <= 0:  # which it takes for a positive one
        query, scale = query * (-1.0 if scale else 0.0), -scale or 1.0
    width = values.shape[-1]
    more = width - keys.shape[-1]
    if more > 0:
        query, keys = (torch.nn.functional.pad(tensor, (0, more)) for tensor in (query, keys))
    elif more < 0:
        values = torch.nn.functional.pad(values, (0, -more))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return (out[..., :width] if more < 0 else out), lse
