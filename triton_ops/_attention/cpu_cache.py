"""Reading a paged cache on the CPU: blocks of a table, and vectors, which are a token's key or value of one KV head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .._numpy import np
from .call import AttentionCall
from .predicate import Mask

# Keys or values of a gather as they are computed with. Larger ones are fresh pages from the system on every call, at
# several times the copy's cost.
GATHER_BYTES = 4 << 20
_SUMMED = (torch.float32, torch.float16, torch.bfloat16)
Strides = tuple[int, ...]


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


class Cache:
    """Keys and values of a call, read as tensors of one dtype."""

    def __init__(self, call: AttentionCall) -> None:
        key, value = self._key, self._value = call.key_cache, call.value_cache
        self._k_scale, self._v_scale, self._is_latent = call.k_scale, call.v_scale, call.is_latent
        is_half = call.query.dtype == key.dtype == torch.bfloat16
        # PyTorch's flash kernel takes twice as long for float16 as for float32.
        self.dtype = torch.bfloat16 if is_half else torch.float32
        _, self.block_size, self.kv_heads, key_width = key.shape
        self.width = value.shape[3]
        self._vector_bytes = max(key_width, self.width) * self.dtype.itemsize

    def at_once(self, kv_heads: int) -> int:
        """Tokens of so many KV heads that a gather may hold."""
        return max(1, GATHER_BYTES // (kv_heads * self._vector_bytes))

    def pieces(
        self, table: np.ndarray, begin: int, end: int, views: bool = False, few: bool = False
    ) -> Iterator[Piece]:
        """The present tokens of [begin, end), as many at once as a gather may hold.

        `views`: all are one piece where that is no copy. `few`: few queries attend to each, so that half of a gather is
        faster: it stays in a larger cache.
        """
        if end <= begin:
            return
        size = self.block_size
        first = begin // size
        own = table[first : -(-end // size)]
        if views and self._key.dtype == self.dtype and self._k_scale is None and _adjacent(own):
            whole, skip = slice(int(own[0]), int(own[0]) + len(own)), begin % size
            keys, values = (x[whole].flatten(0, 1)[skip : skip + end - begin] for x in (self._key, self._value))
            yield Piece(keys, values, np.arange(first, first + len(own)), skip, size)
            return
        present = np.flatnonzero(own >= 0)
        step = max(1, self.at_once(self.kv_heads) // (2 if few else 1) // size)
        for cut in range(0, len(present), step):
            live = present[cut : cut + step]
            keys, values = self.read(own[live])
            skip = begin - first * size if live[0] == 0 else 0
            stop = len(live) * size - (len(own) * size - (end - first * size) if live[-1] == len(own) - 1 else 0)
            yield Piece(keys[skip:stop], values[skip:stop], live + first, skip, size)

    def read(self, blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, num_kv_heads, head_dim]` of blocks; views where the blocks are adjacent."""
        index = None if _adjacent(blocks) else torch.from_numpy(blocks.astype(np.int64))
        first, end = int(blocks[0]), int(blocks[0]) + len(blocks)

        def taken(cache: torch.Tensor) -> torch.Tensor:
            return (cache[first:end] if index is None else cache.index_select(0, index)).flatten(0, 1)

        keys = self._as_read(taken(self._key), self._k_scale)
        return keys, keys[..., : self.width] if self._is_latent else self._as_read(taken(self._value), self._v_scale)

    def _as_read(self, rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Of rows `[..., heads, head_dim]`, or `[entries, n, head_dim]` with their entries' scales."""
        if scale is not None:
            rows = rows.to(torch.float32).mul_(scale.to(torch.float32)[..., None])
        return rows if rows.dtype == self.dtype else rows.to(self.dtype)


class Vectors(Cache):
    """A cache whose vectors have numbers, as the keys lie in memory."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__(call)
        self._keys, key_strides = _as_matrix(self._key)
        self._values, value_strides = _as_matrix(self._value)
        if self._is_latent:
            self._values, value_strides = self._keys[:, : self.width], key_strides
        # Vectors from block to block, slot to slot, head to head.
        self._strides = key_strides
        self._moves: tuple[Strides, ...] = ()
        # By number, `[vectors, head_dim]`, where they can be computed with as they lie.
        self.in_place: tuple[torch.Tensor, torch.Tensor] | None = None
        if key_strides != value_strides:
            self._strides = (self.block_size * self.kv_heads, self.kv_heads, 1)
            self._moves = (key_strides, value_strides)
        elif self._key.dtype == torch.float32 and self._keys.is_contiguous() and self._values.is_contiguous():
            self.in_place = self._keys, self._values
        count = max(self._keys.shape[0], self._key.numel() // self._key.shape[3])
        self._wide = np.int64 if count > 1 << 31 else np.int32

    def of_blocks(self, blocks: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Numbers `[n, block_size]` of the vectors in blocks, each of one KV head."""
        wide, (block, slot, head) = self._wide, self._strides
        first = blocks.astype(wide, copy=False) * wide(block)
        first += (heads * head).astype(wide, copy=False)
        return np.asarray(first[:, None] + np.arange(self.block_size, dtype=wide) * wide(slot))

    def gather(self, vectors: np.ndarray, heads: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[entries, n, head_dim]` of vectors `[entries, n]`, each entry's of one KV head."""
        index = torch.from_numpy(vectors.reshape(-1))
        if self._is_latent:
            rows = _take(self._keys, index, torch.arange(index.shape[0], dtype=index.dtype))
            rows = self._as_read(rows.view(*vectors.shape, -1), self._k_scale)
            return rows, rows[..., : self.width]
        places = [self._moved(index, strides) for strides in self._moves] or [index, index]
        each = torch.arange(index.shape[0], dtype=places[0].dtype)
        taken = [_take(matrix, place, each) for matrix, place in zip((self._keys, self._values), places, strict=True)]
        keys, values = (rows.view(*vectors.shape, rows.shape[1]) for rows in taken)
        if self._k_scale is None or self._v_scale is None:
            return self._as_read(keys, None), self._as_read(values, None)
        each = torch.from_numpy(heads)
        k_scale, v_scale = (x.expand(self.kv_heads)[each, None] for x in (self._k_scale, self._v_scale))
        return self._as_read(keys, k_scale), self._as_read(values, v_scale)

    def _moved(self, vectors: torch.Tensor, strides: Strides) -> torch.Tensor:
        """Where vectors, numbered as in a contiguous cache, lie in a matrix of these strides."""
        block, slot, head = strides
        slots, heads = vectors.long() // self.kv_heads, vectors % self.kv_heads
        return slots // self.block_size * block + slots % self.block_size * slot + heads * head


@dataclass(frozen=True, slots=True)
class Ranges:
    """Attended ranges, each `[entries]`: from begin to end, and what is below sink_end; None for 0."""

    end: np.ndarray
    begin: np.ndarray | None = None
    sink_end: np.ndarray | None = None

    @classmethod
    def of(cls, positions: np.ndarray | None, lens: np.ndarray, mask: Mask) -> Ranges:
        """Of single queries at positions, or the last ones, of sequences that are `lens` long."""
        if not mask.BOUNDED:
            return cls(lens if positions is None or not mask.CAUSAL else np.minimum(lens, positions + 1))
        if positions is None:
            positions = lens - 1
        each = [mask.attended_range(p, p, n) for p, n in zip(positions.tolist(), lens.tolist(), strict=True)]
        sink_end, begin, end = np.array(each, dtype=np.int64).reshape(-1, 3).T
        return cls(end, begin, sink_end)

    @property
    def count(self) -> np.ndarray:
        """Keys in range, absent ones included."""
        return self.end if self.begin is None or self.sink_end is None else self.sink_end + self.end - self.begin

    def repeat(self, kv_heads: int) -> Ranges:
        """The same for every KV head."""
        if self.begin is None or self.sink_end is None:
            return Ranges(self.end.repeat(kv_heads))
        return Ranges(*(bound.repeat(kv_heads) for bound in (self.end, self.begin, self.sink_end)))

    def vectors(
        self, cache: Vectors, heads: np.ndarray, logical: np.ndarray, numbers: np.ndarray, is_inside: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of the keys in range, and how many each entry has; the entries' KV heads are `heads` `[entries]`.

        `logical` blocks ascend, `[entries, n]`, or `[n]` the same for all; `numbers` `[entries, n]` are theirs, -1 for
        an absent one. `is_inside`: all that are present have a key in range.
        """
        size, live = cache.block_size, numbers >= 0
        if not is_inside:
            live &= logical * size < self.end[:, None]
            if self.begin is not None and self.sink_end is not None:
                live &= ((logical + 1) * size > self.begin[:, None]) | (logical * size < self.sink_end[:, None])
        sizes = live.sum(axis=1)
        lengths = sizes * size
        vectors = cache.of_blocks(numbers[live], heads.repeat(sizes))
        if self.begin is None and not (self.end % size).any():
            return vectors.reshape(-1), lengths
        logical = live.nonzero()[1] if logical.ndim == 1 else logical[live]
        if self.begin is not None and self.sink_end is not None:
            t, entry = logical[:, None] * size + np.arange(size), np.arange(len(sizes)).repeat(sizes)
            end, begin, sink_end = (bound[entry, None] for bound in (self.end, self.begin, self.sink_end))
            is_seen = (t < end) & ((t >= begin) | (t < sink_end))
            return vectors[is_seen], np.bincount(entry, is_seen.sum(axis=1), len(sizes)).astype(np.int64)
        # Slots behind an entry's end, all of its last block.
        whole, tail = np.divmod(self.end, size)
        last = logical[np.maximum(sizes.cumsum() - 1, 0)] if len(logical) else whole - 1
        dead = np.where((tail > 0) & (sizes > 0) & (last == whole), size - tail, 0)
        lengths -= dead
        most = int(dead[0])
        if (dead == most).all() and (not most or (lengths == lengths[0]).all()):
            by_entry = vectors.reshape(len(dead), -1) if most else vectors
            return by_entry[:, : by_entry.shape[1] - most].reshape(-1), lengths
        own = dead.nonzero()[0]
        is_seen = np.ones(vectors.shape, dtype=bool)
        is_seen[sizes.cumsum()[own] - 1] = np.arange(size) < size - dead[own, None]
        return vectors[is_seen], lengths


def _as_matrix(cache: torch.Tensor) -> tuple[torch.Tensor, Strides]:
    """A cache as a matrix of vectors, and how many lie from block to block, slot to slot and head to head."""
    if cache.is_contiguous():
        _, size, heads, width = cache.shape
        return cache.view(-1, width), (size * heads, heads, 1)
    strides = [stride if size > 1 else 0 for stride, size in zip(cache.stride()[:3], cache.shape[:3], strict=True)]
    step, width = math.gcd(*strides), cache.shape[3]
    if step % width == 0:
        step = width
    last = sum(stride * (size - 1) for stride, size in zip(strides, cache.shape[:3], strict=True))
    return cache.as_strided((last // step + 1, width), (step, 1)), tuple(stride // step for stride in strides)


def _take(matrix: torch.Tensor, index: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, each as a sum of one: that kernel fetches ahead, in two thirds of index_select's time."""
    if matrix.dtype in _SUMMED and matrix.is_contiguous():
        return torch.embedding_bag(matrix, index, each)[0]
    return matrix.index_select(0, index)


def _adjacent(blocks: np.ndarray) -> bool:
    """Whether the blocks are present and follow each other in memory."""
    return (
        len(blocks) > 0
        and int(blocks[0]) >= 0
        and int(blocks[-1]) - int(blocks[0]) == len(blocks) - 1
        and bool((np.diff(blocks) == 1).all())
    )
