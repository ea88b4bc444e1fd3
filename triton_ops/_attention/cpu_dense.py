"""Sequences one by one, each over one block table for all heads."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch

from .._numpy import np
from .._rows.ops import contiguous_runs
from .call import AttentionCall
from .checks import tree_bits
from .cpu_cache import Cache, Ranges
from .cpu_masked import MAX_SCORES, Part, attend_scattered, attend_tree, flash, full_parts, masked_parts, merge_parts
from .cpu_sparse import attend_decodes

# Chunks shorter than this on average share one pass over the keys: each alone would gather all that is before it.
LONG_CHUNK = 64
# Sequences with fewer attended keys are decoded together.
_BATCHED_KEYS = 4096


def attend_sequences(
    call: AttentionCall, out: torch.Tensor, lse: torch.Tensor, done: Collection[int] = frozenset()
) -> None:
    """Writes the results of all sequences but those that are done, sinks left out."""
    cache = Cache(call)
    query = call.query.to(cache.dtype)
    tables = call.block_tables.numpy()
    starts = call.query_start_loc.tolist()
    positions = None if call.query_positions is None else call.query_positions.numpy().astype(np.int64)
    done = {*done, *_decode_together(call, cache, out, lse, {*done})}
    for i, seq_len in enumerate(call.seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop or not seq_len or i in done:
            continue
        count = rows.stop - rows.start
        own = positions[rows] if positions is not None else np.arange(seq_len - count, seq_len)
        if call.tree_mask is not None:
            bits = tree_bits(call.tree_mask[rows], count)
            out[rows], lse[rows] = attend_tree(query[rows], cache, tables[i], seq_len, own, bits, call)
            continue
        chunks = [[0, seq_len - count, count]] if positions is None else contiguous_runs(own).tolist()
        if not call.mask.BOUNDED and len(chunks) > max(1, count // LONG_CHUNK):
            out[rows], lse[rows] = attend_scattered(query[rows], cache, tables[i], seq_len, own, call)
            continue
        for begin, position, many in chunks:
            part = slice(rows.start + begin, rows.start + begin + many)
            out[part], lse[part] = _attend_chunk(query[part], cache, tables[i], seq_len, position, call)


def _attend_chunk(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, call: AttentionCall
) -> Part:
    """Queries at positions position, position + 1, ... of one sequence."""
    count, width, mask = query.shape[0], cache.width, call.mask
    last = position + count - 1
    sink_end, begin, end = mask.attended_range(last, last, seq_len)
    if call.terms.PLAIN and (count == 1 or (mask.is_whole(last) and (not call.causal or end <= position))):
        spans = (full_parts(query, cache, table, *span, call.scale) for span in ((0, sink_end), (begin, end)))
        return merge_parts(itertools.chain.from_iterable(spans), query, width)
    if call.terms.PLAIN and mask.is_whole(last):
        own_blocks, skip = (
            table[position // cache.block_size : -(-end // cache.block_size)],
            position % cache.block_size,
        )
        if bool((own_blocks >= 0).all()):
            keys, values = (x[skip : skip + end - position] for x in cache.read(own_blocks))
            before = full_parts(query, cache, table, 0, position, call.scale)
            return merge_parts([flash(query, keys, values, call.scale, True), *before], query, width)
    reached = sink_end + end - begin
    # A slice of as many queries as one of them has keys reads twice as many.
    step = max(1, min(count, max(16, reached), MAX_SCORES // max(1, min(seq_len, 2 * reached) * query.shape[1])))
    slices = []
    for b in range(0, count, step):
        positions = np.arange(position + b, min(last + 1, position + b + step))
        parts = masked_parts(query[b : b + step], cache, table, seq_len, positions, call)
        slices.append(merge_parts(parts, query[b : b + step], width))
    return torch.cat([part[0] for part in slices]), torch.cat([part[1] for part in slices])


def _decode_together(
    call: AttentionCall, cache: Cache, out: torch.Tensor, lse: torch.Tensor, done: set[int]
) -> set[int]:
    """Writes the results of sequences of one query and few attended keys, if several; returns which."""
    if not call.terms.PLAIN or call.tree_mask is not None or call.seq_lens.shape[0] - len(done) < 2:
        return set()
    starts, lens = (x.numpy().astype(np.int64) for x in (call.query_start_loc, call.seq_lens))
    single = (np.diff(starts) == 1) & (lens > 0)
    single[list(done)] = False
    positions = None
    if call.query_positions is not None:
        positions = lens - 1
        positions[single] = call.query_positions.numpy()[starts[:-1][single]]
    # Codes are read faster by block than by vector.
    most = _BATCHED_KEYS if call.k_scale is None else cache.at_once(cache.kv_heads) // 16
    members = np.flatnonzero(single & (Ranges.of(positions, lens, call.mask).count <= most))
    if len(members) < 2:
        return set()
    if len(members) == len(lens) == call.query.shape[0]:  # a step of decoding: as it is
        out[:], lse[:] = attend_decodes(call)
        return set(range(len(lens)))
    tokens, sequences = torch.from_numpy(starts[members]), torch.from_numpy(members)
    singles = call.changed(
        query=call.query[tokens],
        block_tables=call.block_tables[sequences],
        seq_lens=call.seq_lens[sequences],
        query_positions=None if call.query_positions is None else call.query_positions[tokens],
    )
    out[tokens], lse[tokens] = attend_decodes(singles)
    return set(members.tolist())
