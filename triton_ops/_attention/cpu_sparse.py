"""Decodes of all sequences, also with block tables for each KV head and lists of blocks, in one batch without masks.

A batch consists of entries. An entry is the query heads of one KV head at one token. All its queries attend to the same
vectors of that KV head. A sampled matrix product reads float32 keys in place, since a copy takes as long as the
arithmetic. Other keys are first gathered, in groups of entries.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from typing import NamedTuple

import numpy as np
import torch

from .._copy.runs import find_runs
from .arguments import AttentionArgs, Result
from .cpu_cache import Cache

# Up to this number of queries in an entry, reading a key for each of them takes less time than a copy.
FEW_QUERIES = 8
# Maximum number of scores that are computed at once.
_MAX_SCORES = 1 << 18
# Keys of a segment. All queries of an entry read one segment before the next, so that a processor's own cache holds it.
_SEGMENT_KEYS = 256
_lock = threading.Lock()


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


class Ranges(NamedTuple):
    """The positions to which each entry attends: [begin, end) and [0, sink_end)."""

    sink_end: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, args: AttentionArgs, runs: list[Run]) -> Ranges:
        """Return the ranges of runs of one query."""
        lens, given, mask = args.seq_lens.tolist(), args.query_positions, args.mask
        positions = [run.position for run in runs] if given is None else given[[run.first for run in runs]].tolist()
        each = [mask.attended_range(p, p, lens[run.sequence]) for p, run in zip(positions, runs, strict=True)]
        return cls(*np.array(each, dtype=np.int64).T)

    @property
    def num_keys(self) -> np.ndarray:
        """The number of keys in range, absent keys included."""
        return np.asarray(self.sink_end + self.end - self.begin)

    def vectors(
        self, cache: Cache, heads: np.ndarray, logical: np.ndarray, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the vectors in range, and their count in each entry. `heads` `[entries]` are KV heads.

        `logical` are ascending blocks, `[entries, n]`, or `[n]` if all entries have the same. `numbers` `[entries, n]`
        are their block numbers, -1 for an absent block.
        """
        sink_end, begin, end = (bound[:, None] for bound in self)
        size, is_bounded = cache.block_size, bool(self.begin.any())
        live = (numbers >= 0) & (logical * size < end)
        if is_bounded:
            live &= ((logical + 1) * size > begin) | (logical * size < sink_end)
        sizes = live.sum(axis=1)
        vectors = cache.of_blocks(numbers[live], heads.repeat(sizes))
        if not is_bounded and not (self.end % size).any():
            return vectors.reshape(-1), sizes * size
        logical = live.nonzero()[1] if logical.ndim == 1 else logical[live]
        t, entry = logical[:, None] * size + np.arange(size), np.arange(len(sizes)).repeat(sizes)
        is_seen = t < end[entry]
        if is_bounded:
            is_seen &= (t >= begin[entry]) | (t < sink_end[entry])
        return vectors[is_seen], np.bincount(entry, is_seen.sum(axis=1), len(sizes)).astype(np.int64)


def attend_decodes(args: AttentionArgs, cache: Cache, runs: list[Run]) -> Result:
    """Return results `[n, num_heads, ...]` of runs of one query, without score modifiers or trees."""
    tokens, sequence = [run.first for run in runs], np.array([run.sequence for run in runs])
    query, size, kv_heads = args.query[tokens], cache.block_size, cache.kv_heads
    (count, heads, width), entries = query.shape, len(runs) * kv_heads
    tables = args.block_tables.numpy().reshape(len(args.seq_lens), -1, args.block_tables.shape[-1])
    ranges = Ranges(*(bound.repeat(kv_heads) for bound in Ranges.of(args, runs)))
    if args.query_blocks is None:
        logical: np.ndarray = np.arange(-(-int(ranges.end.max()) // size))
        numbers = tables[sequence, :, : len(logical)].repeat(kv_heads // tables.shape[1], 1)
    else:
        logical = args.query_blocks.numpy()[tokens]
        numbers = tables[sequence[:, None, None], np.arange(tables.shape[1])[:, None], logical]
        numbers, logical = np.where(logical < 0, -1, numbers), logical.reshape(entries, -1)
    of_entries = np.arange(entries) % kv_heads
    at = ranges.vectors(cache, of_entries, logical, numbers.reshape(entries, -1))
    out, lse = attend_entries(query.float().reshape(entries, -1, width), cache, of_entries, *at, args.scale)
    return out.reshape(count, heads, -1).to(query.dtype), lse.reshape(count, heads)


def attend_entries(
    query: torch.Tensor, cache: Cache, heads: np.ndarray, vectors: np.ndarray, lengths: np.ndarray, scale: float
) -> Result:
    """Attend with queries `[entries, queries, head_dim]` over vectors: one token and KV head of the cache each.

    `vectors` holds the numbers of all entries' vectors in order, and `lengths` how many each entry has. `heads`
    `[entries]` are the KV heads. The result has the queries' shape with the values' width. Its log-sum-exp is
    `[entries, queries]`. An entry without vectors gets a result of 0 and a log-sum-exp of -inf.
    """
    entries, num_queries, _ = query.shape
    most = _MAX_SCORES // num_queries
    if cache.in_place is None:
        most = min(most, cache.at_once(1))
    elif len(vectors) <= most and lengths.all():
        return attend_in_place(query, *cache.in_place, vectors, lengths, scale)
    out = query.new_zeros((entries, num_queries, cache.width))
    lse = query.new_full((entries, num_queries), -math.inf)
    some, first = np.flatnonzero(lengths), 0
    ends = lengths[some].cumsum()
    while first < len(some):
        begin = int(ends[first] - lengths[some[first]])
        last = max(first + 1, int(ends.searchsorted(begin + most, side="right")))
        own, part = some[first:last], vectors[begin : ends[last - 1]]
        index, sizes = torch.from_numpy(own), lengths[own]
        keys_values = cache.in_place
        if keys_values is None:
            keys_values, part = cache.gather(part, heads[own].repeat(sizes)), np.arange(len(part), dtype=part.dtype)
        out[index], lse[index] = attend_in_place(query[index], *keys_values, part, sizes, scale)
        first = last
    return out, lse


def attend_in_place(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    vectors: np.ndarray,
    lengths: np.ndarray,
    scale: float,
) -> Result:
    """Attend with queries `[entries, queries, head_dim]`; the queries of an entry attend to the same keys.

    `keys` and `values` are float32 rows. `vectors` holds the row numbers of one entry after another. Entry i has
    `lengths[i]` of them, at least one.

    A sampled matrix product of queries (rows) and keys (columns) gives the scores at the places of a sparse matrix. A
    weighted sum of rows, PyTorch's embedding bag, gives the results.
    """
    entries, num_queries, width = query.shape
    cuts = -(-lengths // _SEGMENT_KEYS)
    nth, segments, each = concatenated_ranges(np.zeros_like(cuts), cuts), cuts.repeat(cuts), lengths.repeat(cuts)
    # The segments are as even as possible.
    sizes = (nth + 1) * each // segments - nth * each // segments
    columns, ends = _for_each_query(vectors, sizes, num_queries)
    starts, index, row_ends = ends[:-1], torch.from_numpy(columns), torch.from_numpy(ends)
    scores = query.new_zeros(len(columns))
    _silence()
    shape = (len(starts), keys.shape[0])
    places = torch.sparse_csr_tensor(row_ends, index, scores, shape, check_invariants=False)
    query = query.repeat_interleave(torch.from_numpy(cuts), 0).reshape(-1, width)
    torch.sparse.sampled_addmm(places, query, keys.t(), beta=0.0, alpha=scale, out=places)
    weights = scores.numpy()
    top = np.maximum.reduceat(weights, starts)
    weights -= top.repeat(np.diff(ends))
    np.exp(weights, out=weights)
    total = np.add.reduceat(weights, starts).reshape(-1, num_queries)
    out = torch.embedding_bag(values, index, row_ends[:-1], False, 0, False, scores)[0]
    lse = np.log(total) + top.reshape(-1, num_queries)
    # The segments of an entry are merged. An entry of one segment keeps its bits.
    first = cuts.cumsum() - cuts
    most = np.maximum.reduceat(lse, first)
    weights = np.exp(lse - most.repeat(cuts, 0))
    whole = np.add.reduceat(weights, first)
    weights /= whole.repeat(cuts, 0)
    out = out.view(len(sizes), num_queries, -1).div_(torch.from_numpy(total)[..., None])
    out.mul_(torch.from_numpy(weights)[..., None])
    entry = torch.from_numpy(np.arange(entries).repeat(cuts))
    return out.new_zeros((entries, *out.shape[1:])).index_add_(0, entry, out), torch.from_numpy(most + np.log(whole))


def concatenated_ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the numbers of all ranges, one range after another: `sizes[i]` numbers from `begins[i]` on."""
    ends = sizes.cumsum()
    return np.asarray(np.arange(sizes.sum()) + (begins - ends + sizes).repeat(sizes))


def _for_each_query(vectors: np.ndarray, sizes: np.ndarray, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers that each query of each segment reads, one query after another, and offsets into them.

    The offsets begin with 0 and have the end of each query's numbers.
    """
    size = len(vectors) // len(sizes)
    if (sizes == size).all():
        ends = np.arange(0, len(vectors) * num_queries + 1, size, dtype=vectors.dtype)
        return vectors.reshape(len(sizes), 1, size).repeat(num_queries, 1).reshape(-1), ends
    each = sizes.repeat(num_queries)
    ends = np.zeros(len(each) + 1, dtype=vectors.dtype)
    each.cumsum(out=ends[1:])
    return vectors[concatenated_ranges((sizes.cumsum() - sizes).repeat(num_queries), each)], ends


@functools.cache
def _silence() -> None:
    """Suppress torch's warning about sparse tensors, which torch gives only once, by causing it here."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = torch.zeros(2, dtype=torch.int32)
        torch.sparse_csr_tensor(ends, ends[:0], torch.zeros(0), (1, 1), check_invariants=False)
