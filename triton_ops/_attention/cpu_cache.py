"""Reading a paged cache on the CPU: whole blocks, and blocks of one KV head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .call import AttentionCall

# Gathers stay this small: larger ones are fresh pages from the system on every call, at several times the copy's cost.
GATHER_BYTES = 4 << 20
_SUMMED = (torch.float32, torch.float16, torch.bfloat16)


class Matrix(NamedTuple):
    """Keys and values as matrices of rows of head_dim, one per token and KV head.

    Attributes:
        keys: Of its head_dim.
        values: Of theirs; a token of a KV head is the same row of both.
        block_rows: Rows from block to block.
        slot_rows: From token to token.
        head_rows: From KV head to KV head.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_rows: int
    slot_rows: int
    head_rows: int

    @property
    def is_computed_with(self) -> bool:
        """Whether rows are what is computed with, as they lie in the cache."""
        return self.keys.dtype == torch.float32 and self.keys.is_contiguous() and self.values.is_contiguous()

    def cells(self, blocks: np.ndarray, heads: np.ndarray, block_size: int) -> np.ndarray:
        """Rows `[n, block_size]` of blocks, each of one KV head."""
        wide = np.int64 if self.keys.shape[0] > 1 << 31 else np.int32
        first = blocks.astype(wide, copy=False) * wide(self.block_rows)
        first += (heads * self.head_rows).astype(wide, copy=False)
        slots = np.arange(0, block_size * self.slot_rows, self.slot_rows, dtype=wide)
        return np.asarray(first[:, None] + slots)


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
    def kv_heads(self) -> int:
        return self.key.shape[2]

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
        """Keys and values `[rows, tokens, head_dim]` of blocks `[rows, n]` of a KV head a row, or of a slot of each."""
        found: list[torch.Tensor] = []
        index, each, made_for = torch.empty(0), torch.empty(0), None
        for (matrix, strides), scale in zip(self._matrices, (self.k_scale, self.v_scale), strict=True):
            if strides != made_for:
                first = blocks.astype(np.int64) * strides[0] + heads[:, None] * strides[2]
                offsets = (np.arange(self.block_size) if slots is None else slots[:, :, None]) * strides[1]
                index, made_for = torch.from_numpy((first[:, :, None] + offsets).reshape(len(blocks), -1)), strides
                each = torch.arange(index.numel())
            found.append(self._as_read(_take(matrix, index.reshape(-1), each), index, torch.from_numpy(heads), scale))
        return found[0], found[1]

    def rows_at(self, matrix: Matrix, cells: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[sequences, heads, n, head_dim]` at cells `[sequences, heads, n]` of `matrix`."""
        index = cells.reshape(-1)
        each = torch.arange(len(index), dtype=index.dtype)
        keys, values = _take(matrix.keys, index, each), _take(matrix.values, index, each)
        return self._as_read(keys, cells, heads, self.k_scale), self._as_read(values, cells, heads, self.v_scale)

    def _as_read(
        self, found: torch.Tensor, cells: torch.Tensor, heads: torch.Tensor | slice, scale: torch.Tensor | None
    ) -> torch.Tensor:
        rows = found.view(*cells.shape, found.shape[1])
        if scale is not None:
            own = scale.to(torch.float32).expand(self.kv_heads)[heads]
            rows = rows.to(torch.float32).mul_(own.view(-1, 1, 1))
        return rows if rows.dtype == self.dtype else rows.to(self.dtype)

    @property
    def matrix(self) -> Matrix | None:
        """Keys and values as matrices; None where a token of a KV head is not the same row of both."""
        (keys, strides), (values, value_strides) = self._matrices
        return Matrix(keys, values, *strides) if strides == value_strides else None

    @property
    def _matrices(self) -> tuple[tuple[torch.Tensor, list[int]], tuple[torch.Tensor, list[int]]]:
        return _as_rows(self.key), _as_rows(self.value)

    def _dequantized(self, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return rows.to(self.dtype)
        return rows.to(torch.float32).mul_(scale.to(torch.float32).view(-1, 1)).to(self.dtype)


def _as_rows(cache: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """A cache as a matrix of rows of head_dim, and how many of its rows lie between blocks, slots and heads."""
    if cache.is_contiguous():
        _, size, heads, width = cache.shape
        return cache.view(-1, width), [size * heads, heads, 1]
    strides = [stride if size > 1 else 0 for stride, size in zip(cache.stride()[:3], cache.shape[:3], strict=True)]
    step, width = math.gcd(*strides), cache.shape[3]
    if step % width == 0:
        step = width
    last = sum(stride * (size - 1) for stride, size in zip(strides, cache.shape[:3], strict=True))
    return cache.as_strided((last // step + 1, width), (step, 1)), [stride // step for stride in strides]


def _take(matrix: torch.Tensor, index: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, each as a sum of one: that kernel fetches ahead, in two thirds of index_select's time."""
    if matrix.dtype in _SUMMED and matrix.is_contiguous():
        return torch.embedding_bag(matrix, index, each)[0]
    return matrix.index_select(0, index)


def adjacent(blocks: np.ndarray) -> bool:
    """Whether the blocks are present and follow each other in memory."""
    return (
        int(blocks[0]) >= 0
        and int(blocks[-1]) - int(blocks[0]) == len(blocks) - 1
        and bool((np.diff(blocks) == 1).all())
    )


def opened(call: AttentionCall) -> tuple[torch.Tensor, Cache]:
    """Queries and caches as they are computed with."""
    dtype = call.query.dtype if call.key_cache.dtype == call.query.dtype else torch.float32
    return call.query.to(dtype), Cache(call.key_cache, call.value_cache, call.k_scale, call.v_scale, dtype)


@dataclass(frozen=True)
class Piece:
    """Keys and values `[tokens, num_kv_heads, head_dim]` of some present tokens of a sequence, in its order."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: np.ndarray  # logical
    skip: int  # slots of the first block
    block_size: int

    @property
    def positions(self) -> np.ndarray:
        """`[tokens]`, of the sequence."""
        slots = self.blocks[:, None] * self.block_size + np.arange(self.block_size)
        return slots.reshape(-1)[self.skip : self.skip + len(self.keys)]


def present(cache: Cache, table: np.ndarray, begin: int, end: int) -> Iterator[Piece]:
    """The present tokens of [begin, end), as many at once as a gather may hold."""
    size = cache.block_size
    first = begin // size
    own = table[first : -(-end // size)] if end > begin else table[:0]
    present = np.flatnonzero(own >= 0)
    step = max(1, GATHER_BYTES // cache.token_bytes // size)
    for cut in range(0, len(present), step):
        live = present[cut : cut + step]
        keys, values = cache.read(own[live])
        skip = begin - first * size if live[0] == 0 else 0
        stop = len(live) * size - (len(own) * size - (end - first * size) if live[-1] == len(own) - 1 else 0)
        yield Piece(keys[skip:stop], values[skip:stop], live + first, skip, size)
