"""Paged attention on CPU tensors in PyTorch, fast enough to serve a small model. `attend` runs a call.

All operators use one predicate, `Mask`. PyTorch's flash kernel for CPUs computes calls without score modifiers. Without
a window it needs no mask: it attends to all keys before a chunk of queries, and causally within the chunk.

    cpu_sparse.py       decodes over float32 keys, and of KV heads that have their own blocks, in one batch
    cpu_masked.py       the flash kernel, with a mask for windows, trees and scattered queries, and score modifiers
    cpu_cache.py        keys and values read from blocks
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from .arguments import AttentionArgs, Result, key_begin_of
from .checks import tree_bits
from .cpu_cache import Cache
from .cpu_masked import attend_masked, concatenated, flash, full_parts, merge_parts
from .cpu_sparse import FEW_QUERIES, Ranges, Run, attend_decodes

# A chunk has consecutive positions. If chunks have fewer queries than this on average, they share one pass over the
# keys, because otherwise each would gather the keys again.
_LONG_CHUNK = 64
# One pass over a shared prefix must spare the other sequences this many tokens together. A shorter one costs more.
_SPARED = 1024


def attend(args: AttentionArgs) -> Result:
    """Return results `[num_tokens, num_heads, value_dim]` and their natural log-sum-exp.

    The log-sum-exp (lse) is `[num_tokens, num_heads]` float32. Rows without keys get 0, and -inf as lse.
    """
    out, lse = _behind_prefix(args) if _shares_prefix(args) else _each_alone(args)
    if args.sinks is not None:
        _add_sinks(out, lse, args.sinks, int(args.query_start_loc[-1]))
    return out, lse


def _shares_prefix(args: AttentionArgs) -> bool:
    """Return whether all queries come after the shared blocks, and one pass over these is worth a merge."""
    prefix, before = key_begin_of(args), args.seq_lens - args.query_start_loc.diff()
    if prefix * (len(before) - 1) < _SPARED or args.batch_invariant or not args.terms.PLAIN:
        return False
    return int(before.min()) >= prefix and int(args.query_start_loc[-1]) > 0


def _behind_prefix(args: AttentionArgs) -> Result:
    """Attend with all queries over the shared blocks, and with those of each sequence over the rest of its keys."""
    cache, prefix, tables = Cache(args), key_begin_of(args), args.block_tables
    own = args._replace(block_tables=tables[:, args.num_shared_blocks :], seq_lens=args.seq_lens - prefix)
    out, lse = _each_alone(own)
    rows = slice(int(args.query_start_loc[-1]))
    query = args.query[rows].to(cache.dtype)
    shared = full_parts(query, cache, tables[0].numpy(), 0, prefix, args.scale)
    out[rows], lse[rows] = merge_parts([(out[rows], lse[rows]), *shared], query, cache.width)
    return out, lse


def _each_alone(args: AttentionArgs) -> Result:
    """Attend with the queries of each sequence, or of each of its KV heads, over its own keys."""
    query, cache, is_plain = args.query, Cache(args), args.terms.PLAIN and args.tree_mask is None
    by_head = args.query_blocks is not None or args.block_tables.dim() == 3
    runs = _runs(args, is_plain)
    batch = _batch(args, cache, [run for run in runs if run.length == 1], by_head) if is_plain else []
    out = query.new_zeros((*query.shape[:2], cache.width))
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    if batch:
        tokens = torch.tensor([run.first for run in batch])
        out[tokens], lse[tokens] = attend_decodes(args, cache, batch)
        runs = [*{*runs} - {*batch}]
    if not by_head:
        _attend_runs(args, cache, runs, out, lse)
    elif runs:
        for head in range(cache.kv_heads):
            heads, own = _of_head(args, head)
            _attend_runs(own, Cache(own), runs, out[:, heads], lse[:, heads])
    return out, lse


def _runs(args: AttentionArgs, is_plain: bool) -> list[Run]:
    """Return the longest possible runs: adjacent queries of a sequence that attend to the same blocks.

    Sequences without keys have no run. If a call has block lists and a window, but no score modifiers, each query is a
    separate run.
    """
    starts, lens = args.query_start_loc.tolist(), args.seq_lens.tolist()
    bounds = [(i, begin, end) for i, (begin, end) in enumerate(itertools.pairwise(starts)) if begin < end and lens[i]]
    if args.query_blocks is not None and any(end - begin > 1 for _, begin, end in bounds):
        lists = args.query_blocks.numpy()
        differs = np.ones(len(lists), dtype=bool)
        if not (is_plain and args.mask.BOUNDED):
            differs[1:] = (lists[1:] != lists[:-1]).any(axis=(1, 2))
        cuts = [
            (i, [begin, *(differs[begin + 1 : end].nonzero()[0] + begin + 1).tolist(), end]) for i, begin, end in bounds
        ]
        bounds = [(i, *pair) for i, edges in cuts for pair in itertools.pairwise(edges)]
    return [Run(i, begin, lens[i] - starts[i + 1] + begin, end - begin) for i, begin, end in bounds]


def _batch(args: AttentionArgs, cache: Cache, runs: list[Run], by_head: bool) -> list[Run]:
    """Return the runs of one query that are attended together."""
    if not runs or not cache.has_vectors or args.query.shape[1] > FEW_QUERIES * cache.kv_heads:
        return []
    if cache.in_place is None and not by_head:
        return []  # keys that have to be copied are read faster by block than by vector
    # A sparse matrix has no more entries in a row than columns, so a table that repeats blocks may be too long.
    most = cache.at_once(1) if cache.in_place is None else len(cache.in_place[0])
    few = Ranges.of(args, runs).num_keys <= most
    return [run for run, is_few in zip(runs, few.tolist(), strict=True) if is_few]


def _of_head(args: AttentionArgs, head: int) -> tuple[slice, AttentionArgs]:
    """Return the query heads of a KV head with its own keys, and the arguments for only these heads."""
    group = args.query.shape[1] // args.key_cache.shape[2]
    own, heads = slice(head, head + 1), slice(head * group, (head + 1) * group)

    def part(per_head: torch.Tensor | None, of: slice) -> torch.Tensor | None:
        return per_head if per_head is None or per_head.numel() == 1 else per_head[of]

    return heads, args._replace(
        query=args.query[:, heads],
        key_cache=args.key_cache[:, :, own],
        value_cache=args.value_cache[:, :, own],
        block_tables=args.block_tables if args.block_tables.dim() == 2 else args.block_tables[:, head],
        query_blocks=None if args.query_blocks is None else args.query_blocks[:, own],
        alibi_slopes=part(args.alibi_slopes, heads),
        k_scale=part(args.k_scale, own),
        v_scale=part(args.v_scale, own),
    )


def _blocks(args: AttentionArgs, run: Run) -> np.ndarray:
    """Return the number of each logical block of a run, -1 if absent. All heads of the call have the same blocks."""
    tables = args.block_tables.numpy()[run.sequence, ..., : -(-int(args.seq_lens[run.sequence]) // args.block_size)]
    if args.query_blocks is None:
        return tables
    lists = args.query_blocks.numpy()[run.first]
    is_listed = np.zeros((len(lists), tables.shape[-1] + 1), dtype=bool)
    np.put_along_axis(is_listed, np.where(lists < 0, tables.shape[-1], lists), True, axis=1)
    return np.where(is_listed[:, :-1], tables, -1)


def _attend_runs(args: AttentionArgs, cache: Cache, runs: list[Run], out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the results of runs, each alone, with all heads over the same blocks."""
    starts = args.query_start_loc.tolist()
    query = args.query.to(cache.dtype)
    for run in runs:
        i, rows = run.sequence, run.rows
        table, seq_len = _blocks(args, run).reshape(-1), int(args.seq_lens[i])
        if args.tree_mask is not None:
            begin, end = starts[i : i + 2]
            own = Run(i, begin, seq_len - (end - begin), end - begin).positions(args)
            tree = own, tree_bits(args.tree_mask[rows], end - begin).numpy()
            out[rows], lse[rows] = attend_masked(query[rows], cache, table, seq_len, run.positions(args), args, tree)
            continue
        chunks = run.chunks(args)
        if len(chunks) > max(1, run.length // _LONG_CHUNK) and not args.mask.BOUNDED:
            out[rows], lse[rows] = attend_masked(query[rows], cache, table, seq_len, run.positions(args), args)
            continue
        for begin, position, count in chunks:
            part = slice(run.first + begin, run.first + begin + count)
            out[part], lse[part] = _attend_chunk(query[part], cache, table, seq_len, position, args)


def _attend_chunk(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, args: AttentionArgs
) -> Result:
    """Return the results of queries at positions position, position + 1, ... of one sequence."""
    count, width, size, mask = query.shape[0], cache.width, cache.block_size, args.mask
    last = position + count - 1
    sink_end, begin, end = mask.attended_range(last, last, seq_len)
    if args.terms.PLAIN and (count == 1 or (mask.is_whole(last) and (not args.causal or end <= position))):
        spans = (full_parts(query, cache, table, *span, args.scale) for span in ((0, sink_end), (begin, end)))
        return merge_parts(itertools.chain.from_iterable(spans), query, width)
    own_blocks = table[position // size : -(-end // size)]
    if args.terms.PLAIN and mask.is_whole(last) and bool((own_blocks >= 0).all()):
        keys, values = (x[position % size :][: end - position] for x in cache.read(own_blocks))
        before = full_parts(query, cache, table, 0, position, args.scale)
        return merge_parts([flash(query, keys, values, args.scale, True), *before], query, width)
    # Shorter slices read fewer keys for each query, longer ones call the kernel less often.
    step = max(64, (sink_end + end - begin) // 2)
    cuts = (slice(begin, begin + step) for begin in range(0, count, step))
    positions = np.arange(position, position + count)
    return concatenated([attend_masked(query[cut], cache, table, seq_len, positions[cut], args) for cut in cuts])


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, num_tokens: int) -> None:
    """Add each head's sink logit to the denominators of the first `num_tokens` tokens."""
    old, sink = lse[:num_tokens], sinks.float()[None]
    share = torch.sigmoid(old - sink).masked_fill_(sink == -math.inf, 1.0)  # a sink of -inf is none
    out[:num_tokens] = out[:num_tokens].float() * share[..., None]
    lse[:num_tokens] = torch.logaddexp(old, sink.expand_as(old))
