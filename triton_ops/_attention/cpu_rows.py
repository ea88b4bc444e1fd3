"""Queries that attend to keys of their own, on the CPU: a row per query and KV head, each with its own list of blocks.

Keys and values are gathered token by token for many rows at once and go through one call of PyTorch's flash kernel, so
that a row costs its live tokens and little besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .cpu_cache import Cache, flash_kernel

# Keys of one gather: they are read again at once, so they are to stay in a processor's own cache.
_GATHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """A query and a KV head, with what they attend to.

    Attributes:
        token: Row of the packed queries.
        head: KV head.
        logical: `[n]`, logical blocks that are present, ascending; each has a key that counts.
        blocks: `[n]`, their block numbers.
        begin: First key position that counts in them.
        end: First key position behind those that count.
        sink_end: Keys before this position count too.
    """

    token: int
    head: int
    logical: np.ndarray
    blocks: np.ndarray
    begin: int
    end: int
    sink_end: int = 0

    def whole(self, size: int, first: int, end: int) -> bool:
        """Whether all keys of blocks `first` to `end` of it count."""
        return (int(self.logical[end - 1]) + 1) * size <= self.end and int(self.logical[first]) * size >= self.begin


def attend_rows(
    query: torch.Tensor, cache: Cache, rows: Sequence[Row], scale: float, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Writes the results of rows, without score terms or sinks.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, the dtype that the cache is read as.
        cache: The cache.
        rows: Their queries and keys.
        scale: Factor on q.k.
        out: `[num_tokens, num_heads, value_dim]`, 0 where a row has no key.
        lse: `[num_tokens, num_heads]`, -inf there.
    """
    size, kv_heads = cache.block_size, cache.key.shape[2]
    group = query.shape[1] // kv_heads
    width = max(1, _GATHER_BYTES // (query.shape[2] * cache.dtype.itemsize) // size)
    # (row, first and end of its blocks), the longest first, so that those beside each other need little padding.
    parts = [(i, a, min(a + width, len(r.blocks))) for i, r in enumerate(rows) for a in range(0, len(r.blocks), width)]
    parts.sort(key=lambda part: part[1] - part[2])
    if not parts:
        return
    tokens, heads = np.array([(rows[i].token, rows[i].head) for i, _, _ in parts]).T
    queries = query.reshape(query.shape[0], kv_heads, 1, group, -1)[torch.from_numpy(tokens), torch.from_numpy(heads)]
    part_out = queries.new_empty((len(parts), group, cache.width), dtype=torch.float32)
    part_lse = queries.new_empty((len(parts), group), dtype=torch.float32)
    begin = 0
    while begin < len(parts):
        longest = parts[begin][2] - parts[begin][1]
        limit = min(len(parts), begin + max(1, width // longest))
        end = begin + 1
        while end < limit and 8 * (parts[end][2] - parts[end][1]) >= 7 * longest:
            end += 1
        blocks, slots, bias = _keys_of(rows, parts[begin:end], size, cache.dtype)
        keys, values = cache.read_rows(blocks, heads[begin:end], slots)
        found, found_lse = flash_kernel(queries[begin:end], keys[:, None], values[:, None], False, scale, bias)
        part_out[begin:end], part_lse[begin:end] = found[:, 0], found_lse.reshape(-1, group)
        begin = end
    _join(rows, parts, part_out, part_lse, out, lse, group)


def _keys_of(
    rows: Sequence[Row], parts: list[tuple[int, int, int]], size: int, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray | None, torch.Tensor | None]:
    """Blocks of parts, padded to the first one's, which is the longest; slots and a bias where not all keys count."""
    longest = parts[0][2] - parts[0][1]
    if all(b - a == longest and rows[i].whole(size, a, b) for i, a, b in parts):
        return np.stack([rows[i].blocks[a:b] for i, a, b in parts]).astype(np.int64), None, None
    blocks = np.empty((len(parts), longest), dtype=np.int64)
    logical = np.full((len(parts), longest), -1, dtype=np.int64)
    bounds = np.empty((3, len(parts), 1, 1), dtype=np.int64)
    for n, (i, a, b) in enumerate(parts):
        row = rows[i]
        blocks[n], logical[n, : b - a] = row.blocks[a], row.logical[a:b]
        blocks[n, : b - a] = row.blocks[a:b]
        bounds[:, n, 0, 0] = row.begin, row.end, row.sink_end
    first, end, sink_end = bounds
    t = logical[:, :, None] * size + np.arange(size)
    live = (logical >= 0)[:, :, None] & (t < end) & ((t >= first) | (t < sink_end))
    # What does not count may hold NaN: in its place a key of its block that counts is read, and has no weight.
    slots = np.where(live, np.arange(size), live.argmax(axis=2)[:, :, None])
    slots[logical < 0] = slots[:, :1, :1].repeat(longest, 1)[logical < 0]
    dead = torch.from_numpy(~live.reshape(len(parts), 1, 1, -1))
    return blocks, slots, torch.zeros(dead.shape, dtype=dtype).masked_fill_(dead, -math.inf)


def _join(
    rows: Sequence[Row],
    parts: list[tuple[int, int, int]],
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    group: int,
) -> None:
    """Sums the parts of each row into its place."""
    of_row: dict[int, list[int]] = {}
    for n, (i, _, _) in enumerate(parts):
        of_row.setdefault(i, []).append(n)
    most = max(len(own) for own in of_row.values())
    table = torch.tensor([own + [-1] * (most - len(own)) for own in of_row.values()])
    tokens = torch.tensor([rows[i].token for i in of_row])
    heads = torch.tensor([rows[i].head for i in of_row])
    if most == 1:
        total_out, total_lse = part_out[table[:, 0]], part_lse[table[:, 0]]
    else:
        own_lse = torch.where((table >= 0)[..., None], part_lse[table], -math.inf)
        total_lse = torch.logsumexp(own_lse, 1)
        total_out = ((own_lse - total_lse[:, None]).exp()[..., None] * part_out[table]).sum(1)
    out.view(out.shape[0], -1, group, out.shape[2])[tokens, heads] = total_out.to(out.dtype)
    lse.view(lse.shape[0], -1, group)[tokens, heads] = total_lse
