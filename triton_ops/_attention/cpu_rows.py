"""Rows: queries with a list of blocks of their own, over one KV head or all, many in each call of the flash kernel.

Lists are cut into parts that fit a processor's own cache, parts of like length are gathered and computed together, and
the parts of a row are summed at the end, so that a row costs its live tokens and little besides.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .cpu_blocks import Blocks, Rows
from .cpu_cache import GATHER_BYTES, Cache
from .cpu_flash import Part, flash_kernel
from .cpu_in_place import MAX_GROUP, attend_in_place

# Keys of one gather for single queries, which do little with them: they are to stay in a processor's own cache.
_GATHER_BYTES = 1 << 20
# Padding keys that cost less than a call of their own.
_PADDING_BYTES = 1 << 18
# Results of parts that wait to be summed.
_PENDING_BYTES = 1 << 24


def empty_part(queries: torch.Tensor, width: int) -> Part:
    """Results of queries without a key."""
    out = queries.new_zeros((*queries.shape[:3], width), dtype=torch.float32)
    return out, queries.new_full(queries.shape[:3], -math.inf, dtype=torch.float32)


def attend_rows(queries: torch.Tensor, cache: Cache, rows: Rows, scale: float) -> Part:
    """Results of rows without score terms or sinks, shaped as their queries, in float32; 0 and -inf without a key."""
    blocks, matrix = rows.blocks, cache.matrix
    is_few = blocks.heads is not None and rows.count == 1 and queries.shape[2] <= MAX_GROUP
    if is_few and matrix is not None and matrix.is_computed_with:
        cells, lengths = blocks.cells(matrix)
        out, lse = attend_in_place(queries[:, 0], matrix, cells, lengths, scale)
        return out[:, None], lse[:, None]
    sizes, block_bytes = blocks.sizes, cache.block_size * cache.token_bytes
    if blocks.heads is not None:
        block_bytes //= cache.kv_heads
    gather = GATHER_BYTES if rows.count > 1 else _GATHER_BYTES
    width, spare = max(1, gather // block_bytes), _PADDING_BYTES // block_bytes
    total = len(sizes) * int(sizes.max(initial=0))
    if 0 < total <= width and total - len(blocks.numbers) <= max(spare, total // 8) and sizes.all():
        part = _flash(queries, cache, blocks, np.arange(len(sizes)), sizes.cumsum() - sizes, sizes, scale)
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
        found = _flash(queries[torch.from_numpy(row[own])], cache, blocks, row[own], begin[own], length[own], scale)
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
    blocks: Blocks,
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
    numbers = blocks.numbers[place]
    if blocks.heads is None:
        keys, values = (x.view(len(row), -1, *x.shape[1:]) for x in cache.read(numbers.reshape(-1)))
    else:
        keys, values = (x[:, :, None] for x in cache.read_rows(numbers, blocks.heads[row]))
    bias = None
    if not even or blocks.reach.cuts(size):
        dead = blocks.reach[row].dead(blocks.logical[place][:, :, None] * size + np.arange(size))
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
