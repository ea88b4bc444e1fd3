"""Queries whose keys lie scattered over the cache, without modifiers of scores: decodes, tables of heads, lists.

A batch is made of entries: the heads of a group at one token or at several of a chunk, with the vectors of keys that
all of these attend to. Few queries read float32 where it lies, since a copy costs as much as to compute with it;
others gather the keys of entries of like length together.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from .._numpy import np
from .call import AttentionCall
from .cpu_cache import Ranges, Vectors
from .cpu_masked import Part, attend_in_place, flash_kernel, merge_parts, spread

# Queries of an entry up to which a key that is read for each of them costs less than a copy.
_FEW_QUERIES = 8
# Scores at once.
_MAX_SCORES = 1 << 18
# The part of a gather's budget for few queries, which do little with a key: with their values keys are to stay in a
# processor's own cache of 1 MB. Twice as many take a tenth longer than where they lie (1,664 keys of 512 bytes, EPYC).
_SMALL_GATHER = 8
# Padding keys that cost less than a call of their own, as a part of the budget.
_PADDING = 16
# Queries and results of one pass over chunks.
_QUERY_BYTES = 16 << 20


def attend_decodes(call: AttentionCall) -> Part:
    """As `attend` of single queries, one of each sequence, without modifiers of scores, a tree or sinks."""
    query, cache = call.query, Vectors(call)
    (num_seqs, heads, width), size, kv_heads = query.shape, cache.block_size, cache.kv_heads
    tables, lens, entries = call.block_tables.numpy(), call.seq_lens.numpy(), num_seqs * kv_heads
    positions = None if call.query_positions is None else call.query_positions.numpy().astype(np.int64)
    ranges = Ranges.of(positions, lens, call.mask)
    each = ranges.end.tolist()
    longest = -(-max(each) // size)
    if call.query_blocks is None:
        logical, numbers = np.arange(longest), tables[..., :longest]
        is_inside = ranges.begin is None and (longest - 1) * size < min(each)
        if tables.ndim == 2:
            numbers = numbers.repeat(kv_heads, 0)
    else:
        lists, sequence = call.query_blocks.numpy(), np.arange(num_seqs)[:, None, None]
        numbers = tables[sequence, lists] if tables.ndim == 2 else tables[sequence, np.arange(kv_heads)[:, None], lists]
        logical, numbers = lists.reshape(entries, -1), np.where(lists < 0, -1, numbers)
        # Lists name blocks of their sequence alone.
        is_inside = ranges.end is lens
    of_entries = _heads(num_seqs, kv_heads)
    at = ranges.repeat(kv_heads).vectors(cache, of_entries, logical, numbers.reshape(entries, -1), is_inside)
    queries = query if query.dtype == cache.dtype else query.to(cache.dtype)
    out, lse = attend_entries(queries.reshape(entries, -1, width), cache, of_entries, *at, call.scale)
    out = out.reshape(num_seqs, heads, -1)
    return (out if out.dtype == query.dtype else out.to(query.dtype)).contiguous(), lse.reshape(num_seqs, heads)


@functools.lru_cache(64)
def _heads(num_seqs: int, kv_heads: int) -> np.ndarray:
    """KV heads of entries; for reading."""
    return np.arange(num_seqs * kv_heads) % kv_heads


@dataclass(frozen=True, slots=True)
class Chunks:
    """Queries at consecutive positions of a sequence, over one KV head, sharing blocks; heads of a token adjoin."""

    token: np.ndarray  # `[chunks]` as all: the first query in the packed batch
    count: np.ndarray
    position: np.ndarray  # of the first
    length: np.ndarray  # of the sequence
    sequence: np.ndarray
    head: np.ndarray  # of KV
    own: np.ndarray  # tokens' keys are attended to causally: all (1), none, or all keys by all queries (0), some (-1)

    def __len__(self) -> int:
        return len(self.token)

    def __getitem__(self, which: np.ndarray | slice) -> Chunks:
        columns = (self.token, self.count, self.position, self.length, self.sequence, self.head, self.own)
        return Chunks(*(column[which] for column in columns))

    @classmethod
    def of(cls, call: AttentionCall, kv_heads: int, alone: bool = False) -> Chunks:
        """Those of sequences that have a key, as long as can be, or each query alone."""
        starts, lens = call.query_start_loc.numpy().astype(np.int64), call.seq_lens.numpy().astype(np.int64)
        sequence = np.arange(len(lens)).repeat(np.diff(starts))
        position = np.arange(len(sequence)) + (lens - starts[1:])[sequence]
        if call.query_positions is not None:
            position = call.query_positions.numpy()[: len(sequence)].astype(np.int64)
        begins = np.ones((len(sequence), kv_heads), dtype=bool)
        if not alone:
            begins[1:] = ((np.diff(sequence) != 0) | (np.diff(position) != 1))[:, None]
            if call.query_blocks is not None:
                lists = call.query_blocks.numpy()[: len(sequence)]
                begins[1:] |= (lists[1:] != lists[:-1]).any(axis=2)
        # Chunks of a head follow each other; then all heads of a token.
        places = np.flatnonzero(begins.T)
        count, (head, token) = np.diff(places, append=begins.size), np.divmod(places, max(1, len(sequence)))
        order = np.argsort(token, kind="stable")
        order = order[lens[sequence[token[order]]] > 0]
        token, count, head = token[order], count[order], head[order]
        own = np.zeros_like(count)
        chunks = cls(token, count, position[token], lens[sequence[token]], sequence[token], head, own)
        many = np.flatnonzero(count > 1)
        if call.causal and len(many):
            own[many] = -1 if call.mask.BOUNDED else chunks[many]._attends_to_own(call)
        return chunks

    def _attends_to_own(self, call: AttentionCall) -> np.ndarray:
        first, last = self.position // call.block_size, (self.position + self.count - 1) // call.block_size
        logical, numbers = self._blocks(call)
        inside = ((logical >= first[:, None]) & (logical <= last[:, None]) & (numbers >= 0)).sum(axis=1)
        is_whole = (inside == last - first + 1) & (self.position + self.count <= self.length)
        return np.where(is_whole, 1, np.where(inside == 0, 0, -1))

    def _blocks(self, call: AttentionCall) -> tuple[np.ndarray, np.ndarray]:
        """Logical blocks, `[chunks, n]` of lists, -1 for none, or `[n]` of tables; their numbers `[chunks, n]`."""
        tables = call.block_tables.numpy()
        if call.query_blocks is None:
            width = -(-int(self.length.max(initial=0)) // call.block_size)
            return np.arange(width), tables[self.sequence, self.head, :width]
        logical = call.query_blocks.numpy()[self.token, self.head].astype(np.int64)
        return logical, np.where(logical >= 0, self._numbers(tables, logical), -1)

    def _numbers(self, tables: np.ndarray, logical: np.ndarray) -> np.ndarray:
        """Numbers of logical blocks `[chunks, n]`."""
        sequence, head = self.sequence[:, None], self.head[:, None]
        return np.asarray(tables[sequence, logical] if tables.ndim == 2 else tables[sequence, head, logical])

    def vectors(self, call: AttentionCall, cache: Vectors) -> tuple[np.ndarray, np.ndarray]:
        """Vectors of the keys that all queries of a chunk attend to, and how many each has; the chunks of one count."""
        if int(self.count[0]) == 1:
            ranges = Ranges.of(self.position, self.length, call.mask)
        else:
            ranges = Ranges(np.minimum(self.length, self.position) if call.causal else self.length)
        return ranges.vectors(cache, self.head, *self._blocks(call))

    def own_vectors(self, call: AttentionCall, cache: Vectors) -> np.ndarray:
        """Vectors `[chunks, count]` of the chunks' own tokens."""
        count, size = int(self.count[0]), call.block_size
        position = self.position[:, None] + np.arange(count)
        numbers = self._numbers(call.block_tables.numpy(), position // size)
        vectors = cache.of_blocks(numbers.reshape(-1), self.head.repeat(count))
        return np.take_along_axis(vectors, position.reshape(-1, 1) % size, 1).reshape(-1, count)

    def of_batch(self, packed: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """Of a packed tensor `[tokens, heads, ...]` chunks of one count: `[chunks, group, count, ...]`, None if a view.

        Else with the index of what is a copy of `[chunks, count, group, ...]` of `[tokens, kv_heads, group, ...]`.
        """
        count, grouped = int(self.count[0]), packed.unflatten(1, (kv_heads, -1))
        first, many = int(self.token[0]), len(self) // kv_heads
        if len(self) == many * kv_heads and (count == 1 or many == 1):
            tokens = np.arange(first * kv_heads, (first + many) * kv_heads)
            if (self.token * kv_heads + self.head == tokens).all():
                view = grouped[first : first + many * count]
                return (view.flatten(0, 1)[:, :, None] if count == 1 else view.movedim(0, 2)), None
        index = (torch.from_numpy(self.token[:, None] + np.arange(count)), torch.from_numpy(self.head)[:, None])
        return grouped[index].transpose(1, 2), index


def attend_chunks(call: AttentionCall, chunks: Chunks, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes the results of chunks that attend to the keys of all their own tokens, or of none."""
    cache = Vectors(call)
    query, kv_heads = call.query.to(cache.dtype), cache.kv_heads
    for count in sorted(set(chunks.count.tolist())):
        same = chunks[chunks.count == count]
        step = max(1, _QUERY_BYTES // (count * 4 * query.shape[1] * query.shape[2] // kv_heads))
        for begin in range(0, len(same), step):
            some = same[begin : begin + step]
            part = _of_chunks(call, some.of_batch(query, kv_heads)[0], cache, some)
            for whole, own in zip((out, lse), part, strict=True):
                of_chunks, index = some.of_batch(whole, kv_heads)
                if index is None:
                    of_chunks.copy_(own)
                else:
                    whole.unflatten(1, (kv_heads, -1))[index] = own.transpose(1, 2).to(whole.dtype)


def _of_chunks(call: AttentionCall, queries: torch.Tensor, cache: Vectors, chunks: Chunks) -> Part:
    """Results of queries `[chunks, group, count, head_dim]` over the keys before them, and causally over their own."""
    shape, (vectors, lengths) = queries.shape, chunks.vectors(call, cache)
    own, part = np.flatnonzero(chunks.own), None
    if len(vectors) or len(own) < len(chunks):
        entries = queries.reshape(len(chunks), -1, shape[3])
        before, lse = attend_entries(entries, cache, chunks.head, vectors, lengths, call.scale)
        part = before.view(*shape[:3], -1), lse.view(shape[:3])
    if not len(own):
        assert part is not None
        return part
    if len(own) < len(chunks):
        chunks, index = chunks[own], torch.from_numpy(own)
        queries = queries[index]
    keys, values = cache.gather(chunks.own_vectors(call, cache), chunks.head)
    square = flash_kernel(queries, keys[:, None], values[:, None], True, call.scale)
    if part is None:
        return square
    if len(queries) == shape[0]:
        return merge_parts([part, square], queries, cache.width)
    merged = merge_parts([(part[0][index], part[1][index]), square], queries, cache.width)
    return part[0].float().index_copy(0, index, merged[0]), part[1].index_copy(0, index, merged[1])


def attend_entries(
    query: torch.Tensor, cache: Vectors, heads: np.ndarray, vectors: np.ndarray, lengths: np.ndarray, scale: float
) -> Part:
    """Queries `[entries, queries, head_dim]` over the vectors of their entries, `lengths` `[entries]` of each in a row.

    The result has the queries' shape with the values' width, its log-sum-exp `[entries, queries]`; 0 and -inf without
    a vector. `heads` `[entries]` are KV heads.
    """
    entries, many, _ = query.shape
    longest, budget = int(lengths.max(initial=0)), cache.at_once(1)
    most = max(1, budget // _SMALL_GATHER) if many <= 4 * _FEW_QUERIES else budget
    is_even = 0 < len(vectors) == entries * longest
    in_place = None if many > _FEW_QUERIES or (is_even and len(vectors) <= most) else cache.in_place
    if is_even and in_place is None:
        return _evenly(query, cache, heads, vectors.reshape(entries, -1), most, scale)
    if in_place is not None and len(vectors) * many <= _MAX_SCORES and lengths.all():
        return attend_in_place(query, *in_place, vectors, lengths, scale)
    out = query.new_zeros((entries, many, cache.width), dtype=torch.float32)
    lse = query.new_full((entries, many), -math.inf, dtype=torch.float32)
    if in_place is not None:
        some, first = np.flatnonzero(lengths), 0
        ends = lengths[some].cumsum()
        while first < len(some):
            begin = int(ends[first] - lengths[some[first]])
            last = max(first + 1, int(ends.searchsorted(begin + _MAX_SCORES // many, side="right")))
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
        if length[last - 1] < longest:  # the part's first vector for padding
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
    """Parts of at most so many vectors, the longest first: entry, begin, length, whether each is its entry's first."""
    entry = np.flatnonzero(lengths)
    cuts = -(-lengths[entry] // most)
    nth, entry = spread(np.zeros_like(cuts), cuts), entry.repeat(cuts)
    length = np.minimum(lengths[entry] - nth * most, most)
    order = np.argsort(-length, kind="stable")
    begin = (lengths.cumsum() - lengths)[entry] + nth * most
    return entry[order], begin[order], length[order], nth[order] == 0


def _evenly(
    query: torch.Tensor, cache: Vectors, heads: np.ndarray, vectors: np.ndarray, most: int, scale: float
) -> Part:
    """As `attend_entries` of vectors `[entries, n]`."""
    (entries, longest), parts = vectors.shape, []
    step = max(1, most // longest)
    for first in range(0, entries, step):
        cut = slice(first, first + step)
        each = (
            _gathered(query[cut], cache, heads[cut], vectors[cut, begin : begin + most], scale)
            for begin in range(0, longest, most)
        )
        parts.append(merge_parts(each, query, cache.width))
    return parts[0] if len(parts) == 1 else (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]))


def _gathered(
    query: torch.Tensor,
    cache: Vectors,
    heads: np.ndarray,
    vectors: np.ndarray,
    scale: float,
    bias: torch.Tensor | None = None,
) -> Part:
    """Queries over vectors `[entries, n]`, gathered at once."""
    keys, values = cache.gather(vectors, heads)
    out, lse = flash_kernel(query[:, None], keys[:, None], values[:, None], False, scale, bias)
    return out[:, 0], lse[:, 0]
