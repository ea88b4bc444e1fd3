"""Steps in which each sequence has as many queries, over blocks that differ from KV head to KV head.

Most steps are such: decodes, and a chunk of one sequence or of several. Each KV head of a sequence is a row. Where rows
have as many keys each, a step is a few calls on tensors without padding or masks.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from .call import AttentionCall
from .cpu_blocks import Blocks, Reach
from .cpu_cache import GATHER_BYTES, Cache, Matrix
from .cpu_flash import Part, flash_kernel, merge_parts
from .cpu_in_place import MAX_GROUP, attend_in_place

# Keys of one gather for single queries, which do little with them: they are to stay in a processor's own cache.
_GATHER_BYTES = 1 << 20


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
    if count == 1:
        rows = query.to(dtype).reshape(len(lengths), -1, 1, width)
    else:
        rows = query.to(dtype).reshape(num_seqs, count, cache.kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(len(lengths), -1, count, width)
    before = torch.from_numpy(cells).view(len(lengths), 1, int(lengths[0]))
    assert blocks.heads is not None
    out, lse = _attend(rows, cache, matrix, blocks.heads, before, own, max(1, most), call.scale)
    if count > 1:
        out, lse = (x.unflatten(0, (num_seqs, -1)).movedim(3, 1) for x in (out, lse))
    out = out.reshape(num_tokens, heads, -1).to(query.dtype)
    return out.contiguous(), lse.reshape(num_tokens, heads)


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
    """Where rows' own keys lie, `[rows, 1, count]`; None where one of their blocks is absent or in no list."""
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
    return torch.from_numpy(cells.reshape(-1, 1, count))


def _attend(
    query: torch.Tensor,
    cache: Cache,
    matrix: Matrix,
    heads: np.ndarray,
    before: torch.Tensor,
    own: torch.Tensor | None,
    most: int,
    scale: float,
) -> Part:
    """Queries over the keys before them, and causally over their own: results `[rows, group, count, head_dim]`.

    Args:
        query: `[rows, group, count, head_dim]`.
        cache: What is attended to.
        matrix: Its matrices.
        heads: `[rows]`, the KV head of each.
        before: `[rows, 1, n]`, cells of keys.
        own: `[rows, 1, count]`, of keys that are attended to causally; None: results are `[rows, 1, group, head_dim]`.
        most: Keys of one gather.
        scale: Factor on q.k.
    """
    step = max(1, most // (before.shape[2] + (0 if own is None else own.shape[2])))
    if step < len(query):
        parts = []
        for first in range(0, len(query), step):
            cut = slice(first, first + step)
            own_cut = None if own is None else own[cut]
            parts.append(_attend(query[cut], cache, matrix, heads[cut], before[cut], own_cut, most, scale))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    parts = []
    if before.shape[2]:
        # The queries of a group as rows of one head: each key is read once per group.
        united = query.reshape(len(query), 1, -1, query.shape[3])
        for cells in before.split(most, 2):
            parts.append(flash_kernel(united, *cache.rows_at(matrix, cells, heads), False, scale))
    if own is not None:
        parts = [(out.reshape(*query.shape[:3], -1), lse.view(query.shape[:3])) for out, lse in parts]
        parts.append(flash_kernel(query, *cache.rows_at(matrix, own, heads), True, scale))
    return merge_parts(parts, query, cache.width)
