"""Sequences one by one, each over one block table for all heads."""

from __future__ import annotations

import numpy as np
import torch

from .._rows.runs import contiguous_runs
from .call import AttentionCall
from .check_values import tree_bits
from .cpu_blocks import Blocks, Reach, Rows
from .cpu_cache import Cache, opened
from .cpu_flash import Part, flash, full_parts, merge_parts
from .cpu_masked import MAX_SCORES, attend_masked, attend_scattered, attend_tree
from .cpu_rows import attend_rows

# Runs shorter than this on average share one pass over the keys: each alone would gather all that is before it.
LONG_RUN = 64
# Sequences with fewer live keys are decoded together.
_BATCHED_KEYS = 4096


def attend_sequences(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor, done: set[int]) -> None:
    """Writes the rows of all sequences but those that are done, sinks left out."""
    compute_query, cache = opened(call)
    tables = call.block_tables.numpy()
    lens = call.seq_lens.tolist()
    starts = call.query_start_loc.tolist()
    positions = None if call.query_positions is None else call.query_positions.numpy()

    batched = done | _decode_batch(compute_query, out, lse, cache, call, done)
    for i, seq_len in enumerate(lens):
        q_begin, q_end = starts[i], starts[i + 1]
        if q_begin == q_end or i in batched:
            continue
        if call.tree_mask is not None:
            rows = slice(q_begin, q_end)
            own = np.arange(seq_len - (q_end - q_begin), seq_len) if positions is None else positions[rows]
            bits = tree_bits(call.tree_mask[rows], q_end - q_begin)
            out[rows], lse[rows] = attend_tree(
                compute_query[rows], cache, tables[i], seq_len, own.astype(np.int64), bits, call
            )
            continue
        if positions is None:
            position = seq_len - (q_end - q_begin)
            # A causal query at a negative position sees nothing.
            begin = max(0, -position) if call.causal else 0
            runs = [(begin, q_end - q_begin, position + begin)] if q_begin + begin < q_end else []
        else:
            own = positions[q_begin:q_end].astype(np.int64)
            runs = [(begin, begin + count, first) for begin, first, count in contiguous_runs(own).tolist()]
            if not call.mask.BOUNDED and len(runs) > max(1, len(own) // LONG_RUN):
                rows = slice(q_begin, q_end)
                out[rows], lse[rows] = attend_scattered(compute_query[rows], cache, tables[i], seq_len, own, call)
                continue
        for begin, end, position in runs:
            rows = slice(q_begin + begin, q_begin + end)
            own_out, own_lse = _attend_run(compute_query[rows], cache, tables[i], seq_len, position, call)
            out[rows], lse[rows] = own_out, own_lse


def _attend_run(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries at positions position, position + 1, ... of one sequence."""
    count = query.shape[0]
    plain = call.terms.PLAIN
    if plain and call.mask.is_whole(position + count - 1):
        parts = _plain_parts(query, cache, table, seq_len, position, call.scale, call.causal)
        if parts is not None:
            return merge_parts(parts, query, cache.width)
    elif plain and count == 1:
        return merge_parts(_window_parts(query, cache, table, seq_len, position, call), query, cache.width)
    sink_end, first, end = call.mask.reach(position + count - 1, position + count - 1, seq_len)
    keys = sink_end + end - first
    # A slice of as many queries as one of them has keys reads twice as many.
    step = max(1, min(count, max(16, keys), MAX_SCORES // max(1, min(seq_len, 2 * keys) * query.shape[1])))
    slices = [
        attend_masked(query[b : b + step], cache, table, seq_len, position + b, call) for b in range(0, count, step)
    ]
    return torch.cat([part[0] for part in slices]), torch.cat([part[1] for part in slices])


def _plain_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, scale: float, causal: bool
) -> list[Part] | None:
    """A run without window or score terms; None when a hole inside the run asks for a mask."""
    if not causal or query.shape[0] == 1:
        end = min(seq_len, position + 1) if causal else seq_len
        return full_parts(query, cache, table, 0, end, scale)
    end = min(seq_len, position + query.shape[0])
    if end <= position:
        return full_parts(query, cache, table, 0, end, scale)
    own = table[position // cache.block_size : -(-end // cache.block_size)]
    if bool((own < 0).any()):
        return None
    keys, values = cache.read(own)
    skip = position % cache.block_size
    square = flash(query, keys[skip : skip + end - position], values[skip : skip + end - position], scale, True)
    return [*full_parts(query, cache, table, 0, position, scale), square]


def _window_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, call: AttentionCall
) -> list[Part]:
    """One query with a window: its window and its sink tokens."""
    sink_end, begin, end = call.mask.reach(position, position, seq_len)
    return [
        *full_parts(query, cache, table, 0, sink_end, call.scale),
        *full_parts(query, cache, table, begin, end, call.scale),
    ]


def _decode_batch(
    query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, cache: Cache, call: AttentionCall, done: set[int]
) -> set[int]:
    """Sequences of one query and few live keys, together; returns the indices of those it did."""
    if not call.terms.PLAIN or call.tree_mask is not None or call.seq_lens.shape[0] - len(done) < 2:
        return set()
    starts, lens = (x.numpy().astype(np.int64) for x in (call.query_start_loc, call.seq_lens))
    single = (np.diff(starts) == 1) & (lens > 0)
    single[list(done)] = False
    members = np.flatnonzero(single)
    if len(members) < 2:
        return set()
    tokens, lens = starts[members], lens[members]
    reach = Reach.of(lens - 1 if call.query_positions is None else call.query_positions.numpy()[tokens], lens, call)
    logical = np.arange(-(-int(lens.max()) // cache.block_size))
    tables = call.block_tables.numpy()[members, : len(logical)]
    blocks = Blocks(None, reach, logical, tables, cache.block_size)
    some = np.flatnonzero(blocks.sizes * cache.block_size <= _BATCHED_KEYS)
    if len(some) < 2:
        return set()
    if len(some) < len(members):
        members, tokens = members[some], tokens[some]
        blocks = Blocks(None, reach[some], logical, tables[some], cache.block_size)
    rows = Rows(tokens, 1, cache.kv_heads, blocks)
    part = attend_rows(rows.queries(query), cache, rows, call.scale)
    rows.write(part, out, lse)
    return set(members.tolist())
