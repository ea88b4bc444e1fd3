"""Steps of one query a sequence, over blocks that differ from KV head to KV head, with as little besides as can be."""

from __future__ import annotations

import numpy as np
import torch

from .call import AttentionCall
from .cpu_cache import Cache, Matrix
from .cpu_flash import Part
from .cpu_in_place import MAX_GROUP, attend_in_place


def attend_decodes(call: AttentionCall) -> Part | None:
    """As `attend`, sinks left out; None for calls that are more than this."""
    query, kv_heads = call.query, call.key_cache.shape[2]
    num_tokens, heads, width = query.shape
    if (
        not 0 < num_tokens == call.seq_lens.shape[0]
        or heads > MAX_GROUP * kv_heads
        or query.dtype != torch.float32
        or call.tree_mask is not None
        or not call.terms.PLAIN
        or call.mask.BOUNDED
        or (call.query_start_loc.numpy() != np.arange(num_tokens + 1)).any()
    ):
        return None
    matrix = Cache(call.key_cache, call.value_cache, call.k_scale, call.v_scale, query.dtype).matrix
    found = None if matrix is None else _cells(call, matrix)
    if matrix is None or found is None:
        return None
    rows = query.reshape(num_tokens * kv_heads, -1, width)
    out, lse = attend_in_place(rows, matrix, *found, call.scale)
    return out.view(num_tokens, heads, -1), lse.view(num_tokens, heads)


def _cells(call: AttentionCall, matrix: Matrix) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows of a matrix that each KV head of each sequence attends to, and how many; None without blocks."""
    size, kv_heads = call.key_cache.shape[1:3]
    tables, ends = call.block_tables.numpy(), call.seq_lens.numpy()
    if call.query_positions is not None and call.causal:
        ends = np.minimum(ends, call.query_positions.numpy().astype(np.int64) + 1)
    longest = -(-int(ends.max()) // size)
    if call.query_blocks is None:
        logical, numbers = np.arange(longest), tables[:, :, :longest]
        live = numbers >= 0
        if len(ends) > 1:
            live &= logical < (-(-ends // size))[:, None, None]
    else:
        logical = call.query_blocks.numpy()
        sequence, head = np.arange(len(tables))[:, None, None], np.arange(kv_heads)[:, None]
        numbers = logical
        if longest:
            numbers = tables[sequence, logical] if tables.ndim == 2 else tables[sequence, head, logical]
        live = (numbers >= 0) & (logical >= 0)
        if call.query_positions is not None:
            live &= logical * size < ends[:, None, None]
    if not numbers.size:
        return None
    sequence, head, place = live.nonzero()
    row = sequence * kv_heads + head
    cells = matrix.cells(numbers[sequence, head, place], head, size)
    lengths = np.bincount(row, minlength=len(ends) * kv_heads) * size
    tails = ends % size
    if tails.any():
        if call.query_blocks is not None:
            place = logical[sequence, head, place]
        cut = (place == (ends // size)[sequence]).nonzero()[0]
        present = np.ones(cells.shape, dtype=bool)
        present[cut] = np.arange(size) < tails[sequence[cut], None]
        lengths[row[cut]] += tails[sequence[cut]] - size
        cells = cells[present]
    return cells.reshape(-1), lengths
