"""Reads from a paged cache on the CPU: blocks of a table, and vectors (a token's key or value of one KV head)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch

from .arguments import AttentionArgs

# Maximum size of the keys that one gather copies, and of the values, in the dtype of the computation. For larger
# tensors the system maps fresh pages on every call, which cost several times as much as the copy.
GATHER_BYTES = 4 << 20
Strides = tuple[int, ...]


Piece = tuple[torch.Tensor, torch.Tensor, np.ndarray]
"""Keys and values `[tokens, num_kv_heads, head_dim]` of some present tokens of a sequence, and their positions."""


class Cache:
    """Keys and values of a call, read as tensors of one dtype, by block or by vector.

    A vector is a token's key or value of one KV head. Its number is its row in `_matrices`.
    """

    def __init__(self, args: AttentionArgs) -> None:
        key, value = self._key, self._value = args.key_cache, args.value_cache
        self._k_scale, self._v_scale, self._is_latent = args.k_scale, args.v_scale, args.is_latent
        is_half = args.query.dtype == key.dtype == torch.bfloat16
        # PyTorch's flash kernel takes twice as long for float16 as for float32.
        self.dtype = torch.bfloat16 if is_half else torch.float32
        _, self.block_size, self.kv_heads, key_width = key.shape
        self.width: int = value.shape[3]
        self._vector_bytes: int = max(key_width, self.width) * self.dtype.itemsize

    @functools.cached_property
    def _matrices(self) -> tuple[tuple[torch.Tensor, Strides], tuple[torch.Tensor, Strides]]:
        """Matrices of the vectors of keys and of values, and their strides between blocks, slots and heads."""
        return _as_matrix(self._key), _as_matrix(self._value)

    @property
    def has_vectors(self) -> bool:
        """Whether a key and its value have the same number."""
        (_, key_strides), (_, value_strides) = self._matrices
        return key_strides == value_strides and not self._is_latent

    @functools.cached_property
    def in_place(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values by number, `[vectors, head_dim]`, if they can be used without a copy; otherwise None."""
        (keys, _), (values, _) = self._matrices
        serves = self._key.dtype == torch.float32 and keys.is_contiguous() and values.is_contiguous()
        return (keys, values) if serves else None

    def at_once(self, kv_heads: int) -> int:
        """Return how many tokens of `kv_heads` KV heads a gather may hold."""
        return max(1, GATHER_BYTES // (kv_heads * self._vector_bytes))

    def pieces(self, table: np.ndarray, begin: int, end: int, views: bool = False) -> Iterator[Piece]:
        """Yield the present tokens of [begin, end) in pieces: one if a gather may hold all, otherwise of half of that.

        Halves are faster, because they stay in the processor's cache. With `views`, all tokens are one piece if that
        needs no copy.
        """
        if end <= begin:
            return
        size = self.block_size
        first = begin // size
        own = table[first : -(-end // size)]
        present = np.flatnonzero(own >= 0)
        step = max(1, self.at_once(self.kv_heads) // size)
        if views and self._key.dtype == self.dtype and self._k_scale is None and _adjacent(own):
            step = len(own)
        elif len(present) > step:
            step = -(-step // 2)
        for cut in range(0, len(present), step):
            live = present[cut : cut + step]
            keys, values = self.read(own[live])
            positions = ((live + first)[:, None] * size + np.arange(size)).reshape(-1)
            inside = slice(max(0, begin - int(positions[0])), len(positions) - max(0, int(positions[-1]) + 1 - end))
            yield keys[inside], values[inside], positions[inside]

    def read(self, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[tokens, num_kv_heads, head_dim]` of blocks, as views if the blocks are adjacent."""
        if _adjacent(blocks):
            whole = slice(int(blocks[0]), int(blocks[0]) + len(blocks))
            keys, values = self._key[whole].flatten(0, 1), self._value[whole].flatten(0, 1)
        else:
            index = torch.from_numpy(blocks.astype(np.int64))
            keys = self._key.index_select(0, index).flatten(0, 1)
            values = keys if self._is_latent else self._value.index_select(0, index).flatten(0, 1)
        keys = self._as_read(keys, self._k_scale)
        return keys, keys[..., : self.width] if self._is_latent else self._as_read(values, self._v_scale)

    def _as_read(self, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Return rows `[..., heads, head_dim]` or `[entries, n, head_dim]`, scaled and converted to `self.dtype`."""
        if scale is not None:
            rows = rows.to(torch.float32).mul_(scale.to(torch.float32)[..., None])
        return rows if rows.dtype == self.dtype else rows.to(self.dtype)

    def of_blocks(self, blocks: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Return the numbers `[n, block_size]` of the vectors in blocks, each block for one KV head."""
        keys, (block, slot, head) = self._matrices[0]
        wide = np.int64 if keys.shape[0] > 1 << 31 else np.int32
        first = blocks.astype(wide, copy=False) * wide(block)
        first += (heads * head).astype(wide, copy=False)
        return np.asarray(first[:, None] + np.arange(self.block_size, dtype=wide) * wide(slot))

    def gather(self, vectors: np.ndarray, heads: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[n, head_dim]` of vectors in float32; `heads` `[n]` are their KV heads."""
        index, found = torch.from_numpy(vectors), []
        for (matrix, _), scale in zip(self._matrices, (self._k_scale, self._v_scale), strict=True):
            rows = matrix.index_select(0, index).float()
            found.append(rows if scale is None else rows.mul_(scale.float().expand(self.kv_heads)[heads, None]))
        return found[0], found[1]


def _as_matrix(cache: torch.Tensor) -> tuple[torch.Tensor, Strides]:
    """Return a cache as a matrix of vectors, and the strides in vectors between blocks, slots and heads."""
    if cache.is_contiguous():
        _, size, heads, width = cache.shape
        return cache.view(-1, width), (size * heads, heads, 1)
    strides = [stride if size > 1 else 0 for stride, size in zip(cache.stride()[:3], cache.shape[:3], strict=True)]
    step, width = math.gcd(*strides), cache.shape[3]
    if step % width == 0:
        step = width
    last = sum(stride * (size - 1) for stride, size in zip(strides, cache.shape[:3], strict=True))
    return cache.as_strided((last // step + 1, width), (step, 1)), tuple(stride // step for stride in strides)


def _adjacent(blocks: np.ndarray) -> bool:
    """Return whether the blocks are present and adjacent in memory."""
    return (
        len(blocks) > 0
        and int(blocks[0]) >= 0
        and int(blocks[-1]) - int(blocks[0]) == len(blocks) - 1
        and bool((np.diff(blocks) == 1).all())
    )
