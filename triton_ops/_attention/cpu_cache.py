"""Reads from a paged cache on the CPU: blocks of a table, and vectors (a token's key or value of one KV head).

An entry is a group of queries that attend to the same vectors of one KV head; see `cpu_sparse`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .arguments import AttentionArgs
from .predicate import Mask

# Maximum size of the keys that one gather copies, and of the values, in the dtype of the computation. For larger
# tensors the system maps fresh pages on every call, which cost several times as much as the copy.
GATHER_BYTES = 4 << 20
_SUMMED = (torch.float32, torch.float16, torch.bfloat16)
Strides = tuple[int, ...]


Piece = tuple[torch.Tensor, torch.Tensor, np.ndarray]
"""Keys and values `[tokens, num_kv_heads, head_dim]` of some present tokens of a sequence, and their positions."""


class Cache:
    """Keys and values of a call, read as tensors of one dtype, by block or by vector.

    A vector is a token's key or value of one KV head. Its number is its row in `_matrices`. If keys and values have
    different strides, its number is the row that it would have in a contiguous cache.
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
        keys, strides = _as_matrix(self._key)
        return (keys, strides), (keys[:, : self.width], strides) if self._is_latent else _as_matrix(self._value)

    @functools.cached_property
    def in_place(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values by number, `[vectors, head_dim]`, if they can be used without a copy; otherwise None."""
        (keys, key_strides), (values, value_strides) = self._matrices
        serves = key_strides == value_strides and self._key.dtype == torch.float32
        return (keys, values) if serves and keys.is_contiguous() and values.is_contiguous() else None

    @functools.cached_property
    def _numbering(self) -> tuple[Strides, type[np.signedinteger]]:
        """The strides of vectors between blocks, slots and heads, and the integer type of their numbers."""
        (keys, strides), (_, value_strides) = self._matrices
        if strides != value_strides:  # numbers are those of a contiguous cache; see `_moved`
            strides = self.block_size * self.kv_heads, self.kv_heads, 1
        count = max(keys.shape[0], self._key.numel() // self._key.shape[3])
        return strides, np.int64 if count > 1 << 31 else np.int32

    def at_once(self, kv_heads: int) -> int:
        """Return how many tokens of `kv_heads` KV heads a gather may hold."""
        return max(1, GATHER_BYTES // (kv_heads * self._vector_bytes))

    def pieces(
        self, table: np.ndarray, begin: int, end: int, views: bool = False, few: bool = False
    ) -> Iterator[Piece]:
        """Yield the present tokens of [begin, end) in pieces, each as large as a gather may be.

        With `views`, all tokens are one piece if that needs no copy. `few` means that few queries attend to each token.
        Pieces then have half of the size, which is faster because they stay in the processor's cache.
        """
        if end <= begin:
            return
        size = self.block_size
        first = begin // size
        own = table[first : -(-end // size)]
        if views and self._key.dtype == self.dtype and self._k_scale is None and _adjacent(own):
            skip = begin % size
            whole = slice(int(own[0]), int(own[0]) + len(own))
            keys, values = (x[whole].flatten(0, 1)[skip : skip + end - begin] for x in (self._key, self._value))
            yield keys, values, np.arange(begin, end)
            return
        present = np.flatnonzero(own >= 0)
        step = max(1, self.at_once(self.kv_heads) // (2 if few else 1) // size)
        for cut in range(0, len(present), step):
            live = present[cut : cut + step]
            keys, values = self.read(own[live])
            skip = begin - first * size if live[0] == 0 else 0
            stop = len(live) * size - (len(own) * size - (end - first * size) if live[-1] == len(own) - 1 else 0)
            positions = ((live + first)[:, None] * size + np.arange(size)).reshape(-1)
            yield keys[skip:stop], values[skip:stop], positions[skip:stop]

    def read(self, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[tokens, num_kv_heads, head_dim]` of blocks, as views if the blocks are adjacent."""
        if _adjacent(blocks):
            whole = slice(int(blocks[0]), int(blocks[0]) + len(blocks))
            keys, values = self._key[whole].flatten(0, 1), self._value[whole].flatten(0, 1)
        elif self.kv_heads == 1 < self._key.stride(1) // self._key.shape[3]:  # a view of one head of a wider cache
            head = np.zeros(1, dtype=np.int64)
            keys, values = self.gather(self.of_blocks(blocks, head).reshape(1, -1), head)
            return keys[0][:, None], values[0][:, None]
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
        (block, slot, head), wide = self._numbering
        first = blocks.astype(wide, copy=False) * wide(block)
        first += (heads * head).astype(wide, copy=False)
        return np.asarray(first[:, None] + np.arange(self.block_size, dtype=wide) * wide(slot))

    def gather(self, vectors: np.ndarray, heads: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[entries, n, head_dim]` of vectors `[entries, n]`. `heads`: each entry's KV head."""
        index, ((keys, key_strides), (values, value_strides)) = torch.from_numpy(vectors.reshape(-1)), self._matrices
        if self._is_latent:
            rows = _take(keys, index).view(*vectors.shape, -1)
            rows = self._as_read(rows, self._k_scale)
            return rows, rows[..., : self.width]
        if key_strides == value_strides:
            taken = _take(keys, index), _take(values, index)
        else:
            taken = _take(keys, self._moved(index, key_strides)), _take(values, self._moved(index, value_strides))
        keys, values = (rows.view(*vectors.shape, rows.shape[1]) for rows in taken)
        if self._k_scale is None or self._v_scale is None:
            return self._as_read(keys, None), self._as_read(values, None)
        each = torch.from_numpy(heads)
        k_scale, v_scale = (x.expand(self.kv_heads)[each, None] for x in (self._k_scale, self._v_scale))
        return self._as_read(keys, k_scale), self._as_read(values, v_scale)

    def _moved(self, vectors: torch.Tensor, strides: Strides) -> torch.Tensor:
        """Convert numbers of vectors in a contiguous cache to their rows in a matrix with these strides."""
        block, slot, head = strides
        slots, heads = vectors.long() // self.kv_heads, vectors % self.kv_heads
        return slots // self.block_size * block + slots % self.block_size * slot + heads * head


@dataclass(frozen=True, slots=True)
class Ranges:
    """The positions to which each entry attends: [begin, end) and [0, sink_end). None means 0 for all entries."""

    end: np.ndarray
    begin: np.ndarray | None = None
    sink_end: np.ndarray | None = None

    @classmethod
    def of(cls, positions: np.ndarray, lens: np.ndarray, mask: Mask) -> Ranges:
        """Return the ranges of single queries at `positions` in sequences with `lens` tokens."""
        if not mask.BOUNDED:
            return cls(np.minimum(lens, positions + 1) if mask.CAUSAL else lens)
        each = [mask.attended_range(p, p, n) for p, n in zip(positions.tolist(), lens.tolist(), strict=True)]
        sink_end, begin, end = np.array(each, dtype=np.int64).reshape(-1, 3).T
        return cls(end, begin, sink_end)

    @property
    def count(self) -> np.ndarray:
        """The number of keys in range, absent keys included."""
        return self.end if self.begin is None or self.sink_end is None else self.sink_end + self.end - self.begin

    def repeat(self, kv_heads: int) -> Ranges:
        """Return the same ranges for each KV head."""
        if self.begin is None or self.sink_end is None:
            return Ranges(self.end.repeat(kv_heads))
        return Ranges(*(bound.repeat(kv_heads) for bound in (self.end, self.begin, self.sink_end)))

    def vectors(
        self, cache: Cache, heads: np.ndarray, logical: np.ndarray, numbers: np.ndarray, is_inside: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the vectors in range, and their count in each entry. `heads` `[entries]` are KV heads.

        `logical` are ascending blocks, `[entries, n]`, or `[n]` if all entries have the same. `numbers` `[entries, n]`
        are their block numbers, -1 for an absent block. With `is_inside`, every present block has a key in range.
        """
        size, live = cache.block_size, numbers >= 0
        if not is_inside:
            live &= logical * size < self.end[:, None]
            if self.begin is not None and self.sink_end is not None:
                live &= ((logical + 1) * size > self.begin[:, None]) | (logical * size < self.sink_end[:, None])
        sizes = live.sum(axis=1)
        vectors = cache.of_blocks(numbers[live], heads.repeat(sizes))
        if self.begin is None and not (self.end % size).any():
            return vectors.reshape(-1), sizes * size
        logical = live.nonzero()[1] if logical.ndim == 1 else logical[live]
        t, entry = logical[:, None] * size + np.arange(size), np.arange(len(sizes)).repeat(sizes)
        is_seen = t < self.end[entry, None]
        if self.begin is not None and self.sink_end is not None:
            is_seen &= (t >= self.begin[entry, None]) | (t < self.sink_end[entry, None])
        return vectors[is_seen], np.bincount(entry, is_seen.sum(axis=1), len(sizes)).astype(np.int64)


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


def _take(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows of a matrix, each as a sum of one row, which takes two thirds of the time of index_select."""
    if matrix.dtype in _SUMMED and matrix.is_contiguous():
        return torch.embedding_bag(matrix, index, torch.arange(len(index), dtype=index.dtype))[0]
    return matrix.index_select(0, index)


def _adjacent(blocks: np.ndarray) -> bool:
    """Return whether the blocks are present and adjacent in memory."""
    return (
        len(blocks) > 0
        and int(blocks[0]) >= 0
        and int(blocks[-1]) - int(blocks[0]) == len(blocks) - 1
        and bool((np.diff(blocks) == 1).all())
    )
