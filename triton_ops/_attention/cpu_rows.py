"""Rows: queries with a list of blocks of their own, over one KV head or all, many in each call of the flash kernel.

Lists are cut into parts that fit a processor's own cache, parts of like length are gathered and computed together, and
the parts of a row are summed at the end, so that a row costs its live tokens and little besides.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from .call import AttentionCall
from .cpu_cache import GATHER_BYTES, Cache, Matrix
from .cpu_flash import Part, flash_kernel
from .cpu_in_place import MAX_GROUP, attend_in_place

# Keys of one gather for single queries, which do little with them: they are to stay in a processor's own cache.
_GATHER_BYTES = 1 << 20
# Padding keys that cost less than a call of their own.
_PADDING_BYTES = 1 << 18
# Results of parts that wait to be summed.
_PENDING_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Reach:
    """Key positions that count for rows, each `[rows]`: from begin to end, and those below sink_end; None for 0."""

    end: np.ndarray
    begin: np.ndarray | None = None
    sink_end: np.ndarray | None = None

    @classmethod
    def of(cls, positions: np.ndarray, lens: np.ndarray, call: AttentionCall) -> Reach:
        """Of single queries at positions of sequences that are `lens` long."""
        mask = call.mask
        if not mask.BOUNDED:
            return cls(np.minimum(lens, positions + 1) if mask.CAUSAL else lens)
        each = [mask.reach(p, p, n) for p, n in zip(positions.tolist(), lens.tolist(), strict=True)]
        sink_end, begin, end = np.array(each, dtype=np.int64).reshape(-1, 3).T
        return cls(end, begin, sink_end)

    def __getitem__(self, rows: np.ndarray) -> Reach:
        if self.begin is None or self.sink_end is None:
            return Reach(self.end[rows])
        return Reach(self.end[rows], self.begin[rows], self.sink_end[rows])

    def blocks(self, logical: np.ndarray, size: int) -> np.ndarray:
        """Which of blocks `[rows, n]` or `[n]` have a key that counts."""
        first = logical * size
        live = first < self.end[:, None]
        if self.begin is not None and self.sink_end is not None:
            live &= (first + size > self.begin[:, None]) | (first < self.sink_end[:, None])
        return np.asarray(live)

    def cuts(self, size: int) -> bool:
        """Whether a block may hold keys that count and others."""
        return self.begin is not None or bool((self.end % size).any())

    def dead(self, t: np.ndarray) -> np.ndarray:
        """Which of key positions `[rows, n, block_size]` do not count."""
        dead = t >= self.end[:, None, None]
        if self.begin is not None and self.sink_end is not None:
            dead |= (t < self.begin[:, None, None]) & (t >= self.sink_end[:, None, None])
        return np.asarray(dead)


@dataclass(frozen=True)
class Rows:
    """Runs of `count` queries, and the blocks that each run attends to.

    Attributes:
        tokens: `[rows]`, the first query of each in the packed batch.
        count: Queries of each.
        heads: `[rows]`, the KV head of each; None: all of them.
        reach: The keys that count in the blocks.
        sizes: `[rows]`, how many blocks each has.
        logical: `[sum(sizes)]`, logical blocks, ascending in each row; all have a key that counts.
        blocks: Their numbers.
        kv_heads: How many there are.
    """

    tokens: np.ndarray
    count: int
    heads: np.ndarray | None
    reach: Reach
    sizes: np.ndarray
    logical: np.ndarray
    blocks: np.ndarray
    kv_heads: int

    @classmethod
    def of(
        cls,
        tokens: np.ndarray,
        count: int,
        heads: np.ndarray | None,
        reach: Reach,
        logical: np.ndarray,
        numbers: np.ndarray,
        cache: Cache,
    ) -> Rows:
        """Of numbers `[rows, n]` those that are present and in reach; `logical` `[rows, n]`, or [n]: 0, 1, ..."""
        live = (numbers >= 0) & reach.blocks(logical, cache.block_size)
        flat, sizes = live.reshape(-1).nonzero()[0], live.sum(axis=1)
        width = numbers.shape[1]
        if logical.ndim == 1:
            own = flat - np.repeat(np.arange(0, len(sizes) * width, max(1, width)), sizes)
        else:
            own = logical.reshape(-1)[flat]
        return cls(tokens, count, heads, reach, sizes, own, numbers.reshape(-1)[flat], cache.kv_heads)

    def cells(self, matrix: Matrix, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a matrix that hold the keys that count, and how many each row here has."""
        assert self.heads is not None
        cells, lengths = matrix.cells(self.blocks, self.heads.repeat(self.sizes), size), self.sizes * size
        if self.reach.cuts(size):
            row = np.arange(len(self.sizes)).repeat(self.sizes)
            live = ~self.reach[row].dead(self.logical[:, None, None] * size + np.arange(size))[:, 0]
            lengths = np.bincount(row, live.sum(axis=1), len(self.sizes)).astype(np.int64)
            cells = cells[live]
        return cells.reshape(-1), lengths

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """`[rows, heads of a row, group * count, head_dim]`."""
        rows, width = len(self.tokens), query.shape[2]
        if self.heads is not None:
            return self.runs(query).reshape(rows, 1, -1, width)
        own = query[self._index()[:, 0] if self.slice is None else self.slice]
        return own.reshape(rows, self.kv_heads, -1, width)

    def runs(self, query: torch.Tensor) -> torch.Tensor:
        """`[rows, group, count, head_dim]` of rows of one KV head each; a view where they are one run's."""
        of_group: torch.Tensor = query.unflatten(1, (self.kv_heads, -1))
        every = self.slice
        if every is None:
            assert self.heads is not None
            return of_group[self._index(), torch.from_numpy(self.heads)[:, None]].transpose(1, 2)
        if self.count > 1:
            return of_group[every].permute(1, 2, 0, 3)
        return of_group[every].flatten(0, 1)[:, :, None]

    def write(self, part: Part, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Stores results, shaped as `queries` or `runs`, into those of the packed batch."""
        rows, group = len(self.tokens), out.shape[1] // self.kv_heads
        for whole, own in zip((out, lse), part, strict=True):
            if self.slice is None:
                of_group, own = whole.unflatten(1, (self.kv_heads, group)), own.to(whole.dtype)
                if self.heads is None:
                    of_group[self._index()[:, 0]] = own
                else:
                    own = own.reshape(rows, group, self.count, *whole.shape[2:]).transpose(1, 2)
                    of_group[self._index(), torch.from_numpy(self.heads)[:, None]] = own
            elif self.count > 1:
                target = whole[self.slice].unflatten(1, (self.kv_heads, group)).movedim(0, 2)
                target.copy_(own.reshape(target.shape))
            else:
                whole[self.slice].copy_(own.reshape(whole[self.slice].shape))

    @functools.cached_property
    def slice(self) -> slice | None:
        """Their tokens, where rows are all heads of tokens that follow each other, or of one run."""
        tokens, each = self.tokens, 1
        if self.heads is not None:
            each = self.kv_heads
            tokens = tokens * each + self.heads
        if len(tokens) % each or (self.count > 1 and len(tokens) != each):
            return None
        first = int(tokens[0])
        if first % each or int(tokens[-1]) != first + len(tokens) - 1 or (tokens[1:] <= tokens[:-1]).any():
            return None
        return slice(first // each, (first + len(tokens)) // each + self.count - 1)

    def _index(self) -> torch.Tensor:
        return torch.from_numpy(self.tokens[:, None] + np.arange(self.count))


def empty_part(queries: torch.Tensor, width: int) -> Part:
    """Results of queries without a key."""
    out = queries.new_zeros((*queries.shape[:3], width), dtype=torch.float32)
    return out, queries.new_full(queries.shape[:3], -math.inf, dtype=torch.float32)


def attend_rows(queries: torch.Tensor, cache: Cache, rows: Rows, scale: float) -> Part:
    """Results of rows without score terms or sinks, shaped as their queries, in float32; 0 and -inf without a key."""
    if rows.heads is not None and rows.count == 1 and queries.shape[2] <= MAX_GROUP and cache.matrix is not None:
        cells, lengths = rows.cells(cache.matrix, cache.block_size)
        out, lse = attend_in_place(queries[:, 0], cache.matrix, cells, lengths, scale)
        return out[:, None], lse[:, None]
    sizes, block_bytes = rows.sizes, cache.block_size * cache.token_bytes
    if rows.heads is not None:
        block_bytes //= cache.kv_heads
    gather = GATHER_BYTES if rows.count > 1 else _GATHER_BYTES
    width, spare = max(1, gather // block_bytes), _PADDING_BYTES // block_bytes
    total = len(sizes) * int(sizes.max(initial=0))
    if 0 < total <= width and total - len(rows.blocks) <= max(spare, total // 8) and sizes.all():
        part = _flash(queries, cache, rows, np.arange(len(sizes)), sizes.cumsum() - sizes, sizes, scale)
        return part[0].float(), part[1]
    out, lse = empty_part(queries, cache.width)
    row, begin, length = _cut(sizes, width)
    waiting: list[tuple[np.ndarray, Part]] = []
    pending = first = 0
    while first < len(row):
        longest = int(length[first])
        last = min(len(row), first + max(1, width // longest))
        padding = np.cumsum(longest - length[first:last])
        last = first + int(np.searchsorted(padding, max(spare, (last - first) * longest // 8), side="right"))
        own = slice(first, last)
        found = _flash(queries[torch.from_numpy(row[own])], cache, rows, row[own], begin[own], length[own], scale)
        waiting.append((row[own], found))
        pending += found[0].numel() * 4
        if pending > _PENDING_BYTES:
            out, lse = _summed(out, lse, waiting)
            waiting, pending = [], 0
        first = last
    return _summed(out, lse, waiting) if waiting else (out, lse)


def _cut(sizes: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parts of lists of at most `width` blocks, the longest first: the row of each, its begin and length."""
    row = np.flatnonzero(sizes)
    length = sizes[row]
    begin = (np.cumsum(sizes) - sizes)[row]
    cuts = -(-length // width)
    nth = np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    row, begin, length = np.repeat(row, cuts), np.repeat(begin, cuts) + nth * width, np.repeat(length, cuts)
    length = np.minimum(length - nth * width, width)
    order = np.argsort(-length, kind="stable")
    return row[order], begin[order], length[order]


def _flash(
    queries: torch.Tensor,
    cache: Cache,
    rows: Rows,
    row: np.ndarray,
    begin: np.ndarray,
    length: np.ndarray,
    scale: float,
) -> Part:
    """Queries of some parts over their keys, shorter ones padded."""
    size, longest = cache.block_size, int(length.max())
    nth = np.arange(longest)
    place = begin[:, None] + nth
    even = len(row) * longest == length.sum()
    if not even:
        place = np.where(nth < length[:, None], place, begin[:, None])
    blocks = rows.blocks[place]
    if rows.heads is None:
        keys, values = (x.view(len(row), -1, *x.shape[1:]) for x in cache.read(blocks.reshape(-1)))
    else:
        keys, values = (x[:, :, None] for x in cache.read_rows(blocks, rows.heads[row]))
    bias = None
    if not even or rows.reach.cuts(size):
        dead = rows.reach[row].dead(rows.logical[place][:, :, None] * size + np.arange(size))
        if not even:
            dead |= (nth >= length[:, None])[:, :, None]
        index = torch.from_numpy(dead.reshape(-1).nonzero()[0])
        if len(index):
            # What does not count may hold NaN, which no weight of 0 would keep out.
            keys, values = (_zeroed(x, cached, index) for x, cached in ((keys, cache.key), (values, cache.value)))
            bias = keys.new_zeros((len(row), 1, 1, longest * size))
            bias.view(-1)[index] = -math.inf
    return flash_kernel(queries, keys.transpose(1, 2), values.transpose(1, 2), False, scale, bias)


def _zeroed(rows: torch.Tensor, cache: torch.Tensor, dead: torch.Tensor) -> torch.Tensor:
    """`rows` `[parts, tokens, ...]` with its dead tokens 0. Never writes to the cache."""
    if rows.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr():
        rows = rows.clone()
    rows.flatten(0, 1).index_fill_(0, dead, 0.0)
    return rows


def _summed(out: torch.Tensor, lse: torch.Tensor, waiting: list[tuple[np.ndarray, Part]]) -> Part:
    """Results of rows with those of some more parts, each of which has a key that counts."""
    row = np.concatenate([rows for rows, _ in waiting])
    part_out, part_lse = (torch.cat([part[n] for _, part in waiting]).float() for n in (0, 1))
    index = torch.from_numpy(row)
    if len(np.unique(row)) == len(row) and bool((lse[index] == -math.inf).all()):
        return out.index_copy_(0, index, part_out), lse.index_copy_(0, index, part_lse)
    every = index.view(-1, *[1] * (lse.dim() - 1)).expand_as(part_lse)
    top = lse.scatter_reduce(0, every, part_lse, "amax")
    shift = top.masked_fill(top == -math.inf, 0.0)
    weight, own = torch.exp(part_lse - shift[index]), torch.exp(lse - shift)
    total = own.index_add(0, index, weight)
    out = out.mul_(own[..., None]).index_add_(0, index, part_out.mul_(weight[..., None]))
    return out.div_(total.masked_fill(total == 0, 1.0)[..., None]), shift + torch.log(total)
