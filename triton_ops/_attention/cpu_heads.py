"""Queries whose blocks differ from KV head to KV head: a block table per head, or a list of blocks per query."""

from __future__ import annotations

import numpy as np
import torch

from .call import AttentionCall
from .check_values import tree_bits
from .cpu_cache import GATHER_BYTES, Cache, Piece
from .cpu_flash import Part, flash_kernel, merge_parts
from .cpu_masked import live_part
from .cpu_rows import attend_rows, empty_part
from .cpu_runs import Runs
from .cpu_sequences import LONG_RUN, attend_sequences

# Queries and results of one pass over rows.
_QUERY_BYTES = 16 << 20
# Neighbours whose lists are united where scores have a mask or a term of their own.
_UNITED = 16


def attend_heads(call: AttentionCall, query: torch.Tensor, cache: Cache, out: torch.Tensor, lse: torch.Tensor) -> None:
    """A block table per KV head; writes the rows of all sequences, sinks left out."""
    counts = np.diff(call.query_start_loc.numpy())
    rest = np.ones(len(counts), dtype=bool)
    if _plain(call) and counts.max(initial=0) <= 1:
        rest[:] = False
        _attend_runs(call, query, cache, Runs.of(call, call.table_heads), out, lse)
    elif _plain(call):
        runs = Runs.of(call, call.table_heads)
        # Short runs share one pass over the keys: each alone would gather all that is before it.
        many = np.bincount(runs.sequence, minlength=len(rest)) // call.table_heads
        rest = (counts > 1) if call.mask.BOUNDED else many > np.maximum(1, counts // LONG_RUN)
        rest[runs.sequence[~runs.whole(call)]] = True
        _attend_runs(call, query, cache, runs[~rest[runs.sequence]], out, lse)
    if rest.any():
        for head in range(call.table_heads):
            heads, own = of_head(call, head)
            attend_sequences(own, out[:, heads], lse[:, heads], set(np.flatnonzero(~rest).tolist()))


def attend_lists(call: AttentionCall, query: torch.Tensor, cache: Cache, out: torch.Tensor, lse: torch.Tensor) -> None:
    """A list of blocks per query and KV head; writes the rows of all sequences, sinks left out."""
    assert call.query_blocks is not None
    lists = call.query_blocks.numpy()
    # Depths of a tree run in any order.
    runs = Runs.of(call if call.tree_mask is None else call.changed(query_positions=None), lists.shape[1])
    if _plain(call):
        runs = runs.cut(None if call.mask.BOUNDED else lists)
        whole = runs.whole(call)
        _attend_runs(call, query, cache, runs if whole.all() else runs[whole], out, lse)
        runs = runs[~whole]
    for n in range(len(runs)):
        heads, own = of_head(call, int(runs.head[n]))
        begin, end = int(runs.token[n]), int(runs.token[n] + runs.count[n])
        for first in range(begin, end, _UNITED):
            rows = slice(first, min(end, first + _UNITED))
            part = _united(own, query[rows, heads], cache, rows, int(runs.sequence[n]), int(runs.head[n]))
            out[rows, heads], lse[rows, heads] = part


def of_head(call: AttentionCall, head: int) -> tuple[slice, AttentionCall]:
    """Query heads of a KV head that has keys of its own, and the call of these alone."""
    group = call.query.shape[1] // call.key_cache.shape[2]
    heads = slice(head * group, (head + 1) * group)

    def part(per_head: torch.Tensor | None, of: slice) -> torch.Tensor | None:
        return per_head if per_head is None or per_head.numel() == 1 else per_head[of]

    own = slice(head, head + 1)
    return heads, call.changed(
        query=call.query[:, heads],
        key_cache=call.key_cache[:, :, own],
        value_cache=call.value_cache[:, :, own],
        block_tables=call.block_tables if call.block_tables.dim() == 2 else call.block_tables[:, head],
        alibi_slopes=part(call.alibi_slopes, heads),
        sinks=part(call.sinks, heads),
        k_scale=part(call.k_scale, own),
        v_scale=part(call.v_scale, own),
    )


def _plain(call: AttentionCall) -> bool:
    return call.terms.PLAIN and call.tree_mask is None


def _attend_runs(
    call: AttentionCall, query: torch.Tensor, cache: Cache, runs: Runs, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Runs that are whole, those of one count together."""
    for count in sorted(set(runs.count.tolist())):
        same = runs[runs.count == count] if (runs.count != count).any() else runs
        step = max(1, _QUERY_BYTES // (count * 4 * query.shape[1] * query.shape[2] // cache.kv_heads))
        for begin in range(0, len(same), step):
            own = same if len(same) <= step else same[begin : begin + step]
            rows = own.rows(call, cache)
            if count == 1 or not call.causal:
                rows.write(attend_rows(rows.queries(query), cache, rows, call.scale), out, lse)
                continue
            queries, part = rows.runs(query), None
            if len(rows.blocks.numbers):
                part = attend_rows(queries.reshape(len(own), 1, -1, query.shape[2]), cache, rows, call.scale)
                part = part[0].view(*queries.shape[:3], -1), part[1].view(queries.shape[:3])
            rows.write(_with_squares(part, queries, own, call, cache), out, lse)


def _with_squares(part: Part | None, queries: torch.Tensor, runs: Runs, call: AttentionCall, cache: Cache) -> Part:
    """Results of runs `[runs, group, count, head_dim]` over what is before them, with those over their own keys."""
    some, blocks, slots = runs.own_keys(call)
    if part is None and len(some) < len(runs):
        part = empty_part(queries, cache.width)
    if not len(some):
        assert part is not None
        return part
    keys, values = cache.read_rows(blocks, runs.head[some], slots)
    own = queries if len(some) == len(runs) else queries[torch.from_numpy(some)]
    square = flash_kernel(own, keys[:, None], values[:, None], True, call.scale)
    if part is None:
        return square
    if len(some) == len(runs):
        return merge_parts([part, square], queries, cache.width)
    index = torch.from_numpy(some)
    merged = merge_parts([(part[0][index], part[1][index]), square], queries, cache.width)
    return part[0].index_copy(0, index, merged[0]), part[1].index_copy(0, index, merged[1])


def _united(call: AttentionCall, query: torch.Tensor, cache: Cache, rows: slice, sequence: int, head: int) -> Part:
    """Queries of one sequence and KV head over the union of their lists, with a mask that says which are whose."""
    assert call.query_blocks is not None
    size, seq_len = call.block_size, int(call.seq_lens[sequence])
    begin, end = call.query_start_loc[sequence : sequence + 2].tolist()
    places = np.arange(seq_len - (end - begin), seq_len)
    own_positions = places if call.query_positions is None else call.query_positions.numpy()[begin:end].astype(np.int64)
    positions = own_positions[rows.start - begin : rows.stop - begin]
    table, lists = call.block_tables.numpy()[sequence], call.query_blocks.numpy()[rows, head]
    chosen = np.zeros((len(lists), len(table) + 1), dtype=bool)
    np.put_along_axis(chosen, np.where(lists < 0, len(table), lists), True, axis=1)
    union = np.flatnonzero(chosen[:, :-1].any(axis=0) & (table >= 0))
    step = max(1, GATHER_BYTES // size // (cache.token_bytes // cache.kv_heads))
    parts: list[Part] = []
    for blocks in (union[cut : cut + step] for cut in range(0, len(union), step)):
        keys, values = (x[0][:, None] for x in cache.read_rows(table[blocks][None], np.array([head])))
        piece = Piece(keys, values, blocks, 0, size)
        t = piece.positions
        live = call.mask.live(t, positions) & (t < seq_len)
        if call.tree_mask is not None:
            # Among the call's own tokens the mask decides, and positions are depths.
            own = np.flatnonzero((t >= places[0]) & (t < seq_len))
            token = t[own] - places[0]
            live[:, own] = tree_bits(call.tree_mask[rows], end - begin)[:, token]
            t[own] = own_positions[token]
        live &= np.repeat(chosen[:, blocks], size, axis=1)
        parts.append(live_part(query, piece, live, positions, call, t))
    return merge_parts(parts, query, cache.width)
