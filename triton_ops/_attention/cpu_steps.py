"""Steps in which each sequence has as many queries, over blocks that differ from KV head to KV head.

Most steps are such: decodes, and a chunk of one sequence or of several. Each KV head of a sequence is a row. Where rows
have as many keys each, a step is a few calls on tensors without padding or masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from .call import AttentionCall
from .cpu_blocks import Blocks, Reach
from .cpu_cache import GATHER_BYTES, Cache, Matrix
from .cpu_flash import Part, flash_kernel, merge_parts
from .cpu_in_place import MAX_GROUP, attend_in_place

# Keys of one gather for single queries, which do little with them: with their values they are to stay in a processor's
# own cache of 1 MB. Twice as many take a tenth longer than where they lie (1,664 keys of 512 bytes on an EPYC).
_GATHER_BYTES = 1 << 19
Read = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]


def attend_steps(call: AttentionCall) -> Part | None:
    """As `attend`, sinks left out; None for calls that are more than this."""
    query, num_seqs = call.query, call.seq_lens.shape[0]
    num_tokens, heads, width = query.shape
    count = num_tokens // max(1, num_seqs)
    if (
        not 0 < num_tokens == count * num_seqs
        or (count > 1 and (not call.causal or call.query_positions is not None))
        or call.tree_mask is not None
        or not call.terms.PLAIN
        or call.mask.BOUNDED
        or call.query_start_loc.tolist() != [*range(0, num_tokens + 1, count)]
    ):
        return None
    # PyTorch's flash kernel takes twice as long for float16 as for float32.
    dtype = torch.bfloat16 if query.dtype == call.key_cache.dtype == torch.bfloat16 else torch.float32
    cache = Cache(call.key_cache, call.value_cache, call.k_scale, call.v_scale, dtype)
    matrix = cache.matrix
    blocks = None if matrix is None else _blocks(call, count)
    if matrix is None or blocks is None:
        return None
    cells, lengths = blocks.cells(matrix)
    is_even, own = len(set(lengths.tolist())) == 1, None
    most = (GATHER_BYTES if count > 1 else _GATHER_BYTES) // (width * dtype.itemsize)
    if count > 1:
        own = _own_cells(call, matrix, blocks.reach.end, count) if is_even else None
        if own is None:
            return None
    elif matrix.is_computed_with and heads <= MAX_GROUP * cache.kv_heads and not (is_even and len(cells) < most):
        out, lse = attend_in_place(query.reshape(len(lengths), -1, width), matrix, cells, lengths, call.scale)
        return out.view(num_tokens, heads, -1), lse.view(num_tokens, heads)
    elif not is_even or not len(cells):
        return None
    rows = (query if query.dtype == dtype else query.to(dtype)).unflatten(0, (num_seqs, count)).transpose(1, 2)
    before = torch.from_numpy(cells).view(num_seqs, cache.kv_heads, -1 if len(cells) else 0)
    out, lse = _attend(rows, functools.partial(cache.rows_at, matrix), before, own, max(1, most), call.scale)
    out, lse = out.transpose(1, 2).reshape(num_tokens, heads, -1), lse.transpose(1, 2).reshape(num_tokens, heads)
    return (out if out.dtype == query.dtype else out.to(query.dtype)).contiguous(), lse


def _blocks(call: AttentionCall, count: int) -> Blocks | None:
    """Those of each KV head of each sequence that hold keys before the call's own, or a single query's own too."""
    tables, lens, size = call.block_tables.numpy(), call.seq_lens.numpy(), call.block_size
    kv_heads, ends = call.key_cache.shape[2], lens if count == 1 else lens - count
    if call.query_positions is not None and call.causal:
        ends = np.minimum(lens, call.query_positions.numpy().astype(np.int64) + 1)
    each = ends.tolist()
    first, longest = min(each), -(-max(each) // size)
    logical: np.ndarray
    if first < 0 or longest < int(count == 1):
        return None
    if call.query_blocks is None:
        logical, numbers = np.arange(longest), tables[:, :, :longest]
        is_inside = (longest - 1) * size < first
    else:
        lists = call.query_blocks.numpy().reshape(len(lens), count, kv_heads, -1)
        logical = lists[:, 0]
        if count > 1 and (lists != lists[:, :1]).any():
            return None
        numbers = np.where(logical < 0, -1, _numbers(tables, logical))
        logical = logical.reshape(len(lens) * kv_heads, -1)
        # Lists name blocks of their sequence alone.
        is_inside = ends is lens
    numbers = numbers.reshape(len(lens) * kv_heads, -1)
    return Blocks(_heads(len(numbers), kv_heads), Reach(ends.repeat(kv_heads)), logical, numbers, size, is_inside)


@functools.lru_cache(64)
def _heads(num_rows: int, kv_heads: int) -> np.ndarray:
    """KV heads of rows; for reading."""
    return np.arange(num_rows) % kv_heads


def _numbers(tables: np.ndarray, logical: np.ndarray) -> np.ndarray:
    """Numbers of logical blocks `[num_seqs, num_kv_heads, n]`, or of the same of each KV head: `[num_seqs, 1, n]`."""
    sequence = np.arange(len(tables))[:, None, None]
    if tables.ndim == 2:
        return np.asarray(tables[sequence, logical])
    return np.asarray(tables[sequence, np.arange(tables.shape[1])[:, None], logical])


def _own_cells(call: AttentionCall, matrix: Matrix, ends: np.ndarray, count: int) -> torch.Tensor | None:
    """Where own keys lie, `[num_seqs, num_kv_heads, count]`; None where one of their blocks is absent or in no list."""
    tables, size, kv_heads = call.block_tables.numpy(), call.block_size, call.key_cache.shape[2]
    positions = ends[::kv_heads, None] + np.arange(count)
    logical = positions // size
    if call.query_blocks is not None:
        first, last = logical[:, :1], logical[:, -1:]
        listed = (call.query_blocks.numpy()[::count] >= first[:, :, None]).sum(axis=2)
        if (listed != last - first + 1).any():
            return None
    numbers = _numbers(tables, logical[:, None])
    if (numbers < 0).any():
        return None
    cells = numbers.astype(np.int64) * matrix.block_rows + (positions % size * matrix.slot_rows)[:, None]
    cells = cells + np.arange(kv_heads)[:, None] * matrix.head_rows
    return torch.from_numpy(cells)


def _attend(
    query: torch.Tensor, read: Read, before: torch.Tensor, own: torch.Tensor | None, most: int, scale: float
) -> Part:
    """Queries over the keys before them, and causally over their own.

    Args:
        query: `[num_seqs, num_heads, count, head_dim]`.
        read: Keys and values of cells `[sequences, KV heads, n]`, given the heads.
        before: `[num_seqs, num_kv_heads, n]`, cells of keys.
        own: `[num_seqs, num_kv_heads, count]`, of keys that are attended to causally.
        most: Keys of one gather.
        scale: Factor on q.k.
    """
    num_seqs, kv_heads, many = before.shape
    step, group = max(1, most // (many + (0 if own is None else own.shape[2]))), query.shape[1] // kv_heads
    if step >= num_seqs * kv_heads:
        return _attend_at_once(query, read, slice(None), before, own, most, scale)
    parts, some = [], max(1, step // kv_heads)
    for first in range(0, num_seqs, some):
        of, row = slice(first, first + some), []
        for head in range(0, kv_heads, step):
            to = slice(head, head + step)
            own_cut, each = None if own is None else own[of, to], query[of, head * group : (head + step) * group]
            row.append(_attend_at_once(each, read, to, before[of, to], own_cut, most, scale))
        parts.append((torch.cat([out for out, _ in row], 1), torch.cat([lse for _, lse in row], 1)))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend_at_once(
    query: torch.Tensor,
    read: Read,
    heads: slice,
    before: torch.Tensor,
    own: torch.Tensor | None,
    most: int,
    scale: float,
) -> Part:
    """As `_attend`, with some KV heads alone: their keys in one gather, or in several where one head has more."""
    parts = []
    if own is not None:
        parts.append(flash_kernel(query, *read(own, heads), True, scale))
    if before.shape[2]:
        # The queries of a group as rows of one head: each key is read once per group.
        united = query.reshape(*before.shape[:2], -1, query.shape[3])
        for cells in before.split(most, 2) if before.shape[2] > most else (before,):
            out, lse = flash_kernel(united, *read(cells, heads), False, scale)
            parts.append((out.reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3])))
    return merge_parts(parts, query, 0)
