"""Attention over scattered keys, without score modifiers: decodes, block tables for each KV head, and lists of blocks.

A batch consists of entries. An entry is the query heads of one KV head, at one or several tokens of a sequence. All its
queries attend to the same vectors of that KV head. An entry with few queries reads float32 keys without a copy, since a
copy takes as long as the arithmetic. Otherwise, the keys of entries with similar lengths are gathered together.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from .._copy.runs import find_runs
from .arguments import AttentionArgs, Result
from .cpu_cache import Cache, Ranges
from .cpu_masked import attend_in_place, concatenated, concatenated_ranges, flash_kernel, merge_parts

# Up to this number of queries in an entry, reading a key for each of them takes less time than a copy.
_FEW_QUERIES = 8
# Maximum number of scores that are computed at once.
_MAX_SCORES = 1 << 18
# With few queries a gather gets an eighth of its usual budget, so that it stays in a processor's own cache of 1 MB.
# With a quarter, it takes a tenth longer than reading keys without a copy (1,664 keys of 512 bytes, EPYC).
_SMALL_GATHER = 8
# Reading up to a 16th of the budget as padding takes less time than a separate call.
_PADDING = 16


class Run(NamedTuple):
    """Adjacent queries of a sequence that attend to the same blocks."""

    sequence: int
    first: int  # row
    position: int  # of the first query, if the call has no query_positions
    length: int  # queries

    @property
    def rows(self) -> slice:
        """The run's rows of query."""
        return slice(self.first, self.first + self.length)

    def positions(self, args: AttentionArgs) -> np.ndarray:
        """Return the positions of the run's queries."""
        if args.query_positions is None:
            return np.arange(self.position, self.position + self.length)
        return args.query_positions[self.rows].numpy().astype(np.int64)

    def chunks(self, args: AttentionArgs) -> list[tuple[int, int, int]]:
        """Return parts with consecutive positions: begin in the run, first position, number of queries."""
        if args.query_positions is None:
            return [(0, self.position, self.length)]
        return [(begin, first, end - first) for begin, first, end in find_runs(self.positions(args))]


def ranges_of(args: AttentionArgs, runs: list[Run]) -> Ranges:
    """Return the ranges that runs of one query attend to."""
    lens = args.seq_lens.numpy()
    is_step = args.query_blocks is None and len(runs) == len(lens)  # one run for each sequence, in order
    if not is_step:
        lens = lens[[run.sequence for run in runs]]
    if args.query_positions is not None:
        positions = args.query_positions.numpy()[[run.first for run in runs]].astype(np.int64)
    elif is_step:
        return Ranges.of(lens - 1, lens, args.mask) if args.mask.BOUNDED else Ranges(lens)
    else:
        positions = np.array([run.position for run in runs])
    return Ranges.of(positions, lens, args.mask)


def attend_decodes(args: AttentionArgs, cache: Cache, runs: list[Run]) -> Result:
    """Return results `[n, num_heads, ...]` of runs of one query, without score modifiers or trees."""
    query, tables, lists = args.query, args.block_tables.numpy(), args.query_blocks
    if len(runs) < len(query):
        tokens = torch.tensor([run.first for run in runs])
        query, lists = query[tokens], None if lists is None else lists[tokens]
    (count, heads, width), size, kv_heads = query.shape, cache.block_size, cache.kv_heads
    ranges, entries = ranges_of(args, runs), count * kv_heads
    if lists is None:
        each = ranges.end.tolist()
        longest = -(-max(each) // size)
        logical: np.ndarray = np.arange(longest)
        numbers = tables[..., :longest]
        if count < len(tables):
            numbers = numbers[[run.sequence for run in runs]]
        is_inside = ranges.begin is None and (longest - 1) * size < min(each)
        if tables.ndim == 2:
            numbers = numbers.repeat(kv_heads, 0)
    else:
        blocks, sequence = lists.numpy(), np.array([run.sequence for run in runs])[:, None, None]
        of_heads = tables.reshape(len(tables), -1, tables.shape[-1])
        numbers = of_heads[sequence, np.arange(of_heads.shape[1])[:, None], blocks]
        # Lists have only blocks of their sequence.
        is_inside = ranges.begin is None and bool((ranges.end == args.seq_lens.numpy()[sequence[:, 0, 0]]).all())
        logical, numbers = blocks.reshape(entries, -1), np.where(blocks < 0, -1, numbers)
    of_entries = _heads(count, kv_heads)
    at = ranges.repeat(kv_heads).vectors(cache, of_entries, logical, numbers.reshape(entries, -1), is_inside)
    queries = query if query.dtype == cache.dtype else query.to(cache.dtype)
    out, lse = attend_entries(queries.reshape(entries, -1, width), cache, of_entries, *at, args.scale)
    out = out.reshape(count, heads, -1)
    dtype = args.query.dtype
    return (out if out.dtype == dtype else out.to(dtype)).contiguous(), lse.reshape(count, heads)


def attend_heads(
    query: torch.Tensor, cache: Cache, blocks: np.ndarray, seq_len: int, position: int, args: AttentionArgs
) -> Result | None:
    """Attend with queries at position, position + 1, ... of one sequence to all keys before them, without modifiers.

    `blocks` `[num_kv_heads, n]` are block numbers, -1 for an absent block. Return None if some, but not all, of the
    queries' own tokens are absent, because that needs a mask.
    """
    count, size, heads = len(query), cache.block_size, np.arange(cache.kv_heads)
    begin, own = position % size, blocks[:, position // size : (position + count - 1) // size + 1]
    is_causal = args.causal and count > 1
    has_own = bool((own >= 0).all()) and position + count <= seq_len
    if is_causal and not has_own and (own >= 0).any():
        return None
    end = min(seq_len, position + (not is_causal)) if args.causal else seq_len
    vectors, lengths = Ranges(np.full(len(heads), end)).vectors(cache, heads, np.arange(blocks.shape[1]), blocks)
    queries = query.unflatten(1, (len(heads), -1)).permute(1, 2, 0, 3)
    out, lse = attend_entries(
        queries.reshape(len(heads), -1, query.shape[2]), cache, heads, vectors, lengths, args.scale
    )
    part = out.view(*queries.shape[:3], -1), lse.view(queries.shape[:3])
    if is_causal and has_own:
        vectors = cache.of_blocks(own.reshape(-1), heads.repeat(own.shape[1])).reshape(len(heads), -1)
        vectors, step, squares = vectors[:, begin : begin + count], max(1, cache.at_once(1) // count), []
        for cut in (slice(first, first + step) for first in range(0, len(heads), step)):
            keys, values = cache.gather(vectors[cut], heads[cut])
            squares.append(flash_kernel(queries[cut], keys[:, None], values[:, None], True, args.scale))
        square = concatenated(squares)
        part = merge_parts([part, square] if end else [square], queries, cache.width)
    return part[0].permute(2, 0, 1, 3).flatten(1, 2), part[1].permute(2, 0, 1).flatten(1, 2)


@functools.lru_cache(64)
def _heads(num_seqs: int, kv_heads: int) -> np.ndarray:
    """Return the KV head of each entry of a decode, `[num_seqs * kv_heads]`. Callers must not write to the result."""
    return np.arange(num_seqs * kv_heads) % kv_heads


def attend_entries(
    query: torch.Tensor, cache: Cache, heads: np.ndarray, vectors: np.ndarray, lengths: np.ndarray, scale: float
) -> Result:
    """Attend with queries `[entries, queries, head_dim]` over vectors: one token and KV head of the cache each.

    `vectors` holds the numbers of all entries' vectors in order, and `lengths` how many each entry has. `heads`
    `[entries]` are the KV heads. The result has the queries' shape with the values' width. Its log-sum-exp is
    `[entries, queries]`. An entry without vectors gets a result of 0 and a log-sum-exp of -inf.

    Entries of one length are gathered at once. Entries with few queries read keys in place if the cache allows it. All
    others are cut into parts; parts of similar lengths are padded to one length and gathered together.
    """
    entries, num_queries, _ = query.shape
    longest, budget = int(lengths.max(initial=0)), cache.at_once(1)
    are_few = num_queries <= _FEW_QUERIES
    most = max(1, budget // _SMALL_GATHER) if are_few else budget
    is_even = 0 < len(vectors) == entries * longest
    in_place = cache.in_place if are_few and not (is_even and len(vectors) <= most) else None
    if in_place is not None and longest > len(in_place[0]):
        in_place = None  # repeated blocks: torch allows no more entries in a sparse matrix than it has elements
    if is_even and in_place is None and longest <= most:
        even, step = vectors.reshape(entries, -1), most // longest
        cuts = [slice(begin, begin + step) for begin in range(0, entries, step)]
        parts = [_gathered(query[cut], cache, heads[cut], even[cut], scale) for cut in cuts]
        return concatenated(parts)
    if in_place is not None and len(vectors) * num_queries <= _MAX_SCORES and lengths.all():
        return attend_in_place(query, *in_place, vectors, lengths, scale)
    out = query.new_zeros((entries, num_queries, cache.width), dtype=torch.float32)
    lse = query.new_full((entries, num_queries), -math.inf, dtype=torch.float32)
    if in_place is not None:
        some, first = np.flatnonzero(lengths), 0
        ends = lengths[some].cumsum()
        while first < len(some):
            begin = int(ends[first] - lengths[some[first]])
            last = max(first + 1, int(ends.searchsorted(begin + _MAX_SCORES // num_queries, side="right")))
            own, of_own = some[first:last], vectors[begin : ends[last - 1]]
            index = torch.from_numpy(own)
            out[index], lse[index] = attend_in_place(query[index], *in_place, of_own, lengths[own], scale)
            first = last
        return out, lse
    entry, begins, length, is_first = _cut(lengths, most)
    first, spare = 0, budget // _PADDING
    while first < len(entry):
        longest = int(length[first])
        last = min(len(entry), first + max(1, most // longest))
        padding = np.cumsum(longest - length[first:last])
        last = first + int(np.searchsorted(padding, max(spare, (last - first) * longest // 8), side="right"))
        cut = slice(first, last)
        own, index = entry[cut], torch.from_numpy(entry[cut])
        nth = np.arange(longest)
        place, bias = begins[cut, None] + nth, None
        if length[last - 1] < longest:  # pad with the part's first vector
            is_padding = nth >= length[cut, None]
            place = np.where(is_padding, begins[cut, None], place)
            bias = query.new_zeros(place.shape).masked_fill_(torch.from_numpy(is_padding), -math.inf)[:, None, None]
        part = _gathered(query[index], cache, heads[own], vectors[place], scale, bias)
        if not is_first[cut].all():
            part = merge_parts([(out[index], lse[index]), part], query, cache.width)
        out[index], lse[index] = part[0].float(), part[1]
        first = last
    return out, lse


def _cut(lengths: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split entries into parts of at most `most` vectors, and sort the parts by length, longest first.

    Return arrays with each part's entry, begin, length, and whether it is the first part of its entry.
    """
    entry = np.flatnonzero(lengths)
    cuts = -(-lengths[entry] // most)
    nth, entry = concatenated_ranges(np.zeros_like(cuts), cuts), entry.repeat(cuts)
    length = np.minimum(lengths[entry] - nth * most, most)
    order = np.argsort(-length, kind="stable")
    begin = (lengths.cumsum() - lengths)[entry] + nth * most
    return entry[order], begin[order], length[order], nth[order] == 0


def _gathered(
    query: torch.Tensor,
    cache: Cache,
    heads: np.ndarray,
    vectors: np.ndarray,
    scale: float,
    bias: torch.Tensor | None = None,
) -> Result:
    """Attend over vectors `[entries, n]`, which are gathered at once."""
    keys, values = cache.gather(vectors, heads)
    out, lse = flash_kernel(query[:, None], keys[:, None], values[:, None], False, scale, bias)
    return out[:, 0], lse[:, 0]
