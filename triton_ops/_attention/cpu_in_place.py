"""Queries over float32 keys and values of one KV head each, where they lie in the cache.

Two of PyTorch's kernels take rows by their index: a product of matrices at the places of a sparse one, whose rows are
queries and whose columns are keys, gives scores; a weighted sum of rows, made for bags of embeddings, gives results.
What a head attends to lies scattered over the cache, and a copy of it costs as much as to compute with it.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings

import numpy as np
import torch

from .cpu_cache import Matrix
from .cpu_flash import Part

# Query heads of a KV head up to which a key that is read for each of them costs less than a copy.
MAX_GROUP = 8
# Keys that the query heads of a group take turns over, so that they stay in a processor's own cache.
_PART_KEYS = 256
# Scores at once.
_MAX_SCORES = 1 << 18
_lock = threading.Lock()


def attend_in_place(query: torch.Tensor, cache: Matrix, cells: np.ndarray, lengths: np.ndarray, scale: float) -> Part:
    """Results `[rows, group, head_dim]` of queries over rows of a cache; 0 without one.

    Args:
        query: `[rows, group, head_dim]`.
        cache: What is attended to.
        cells: `[sum(lengths)]`, the rows of it that each attends to, one after the other.
        lengths: `[rows]`, how many.
        scale: Factor on q.k.

    Returns:
        The results, and the log-sum-exp `[rows, group]`; -inf without a key.
    """
    rows, group, _ = query.shape
    shortest = int(lengths.min()) if rows else 0
    if shortest and len(cells) * group <= _MAX_SCORES:
        return _attend(query, cache, cells, lengths, shortest, scale)
    out = query.new_zeros((rows, group, cache.values.shape[1]))
    lse = query.new_full((rows, group), -math.inf)
    some = np.flatnonzero(lengths)
    lengths, first = lengths[some], 0
    ends = lengths.cumsum()
    while first < len(some):
        begin = int(ends[first] - lengths[first])
        last = max(first + 1, int(ends.searchsorted(begin + _MAX_SCORES // group, side="right")))
        index, own = torch.from_numpy(some[first:last]), lengths[first:last]
        out[index], lse[index] = _attend(query[index], cache, cells[begin : ends[last - 1]], own, int(own.min()), scale)
        first = last
    return out, lse


def _attend(
    query: torch.Tensor, cache: Matrix, cells: np.ndarray, lengths: np.ndarray, shortest: int, scale: float
) -> Part:
    rows, group, width = query.shape
    cuts, even = None, shortest * rows == len(cells)
    if len(cells) > _PART_KEYS and int(lengths.max()) > _PART_KEYS:
        cuts = -(-lengths // _PART_KEYS)
        lengths = _shares(lengths, cuts)
        even = int(lengths.min()) * len(lengths) == len(cells)
        query = query.repeat_interleave(torch.from_numpy(cuts), 0)
    columns, ends = _in_turns(cells, lengths, group, even)
    starts, index, row_ends = ends[:-1], torch.from_numpy(columns), torch.from_numpy(ends)
    scores = query.new_zeros(len(columns))
    _silence()
    shape = (len(starts), cache.keys.shape[0])
    places = torch.sparse_csr_tensor(row_ends, index, scores, shape, check_invariants=False)
    torch.sparse.sampled_addmm(places, query.reshape(-1, width), cache.keys.t(), beta=0.0, alpha=scale, out=places)
    weights = scores.numpy()
    top = np.maximum.reduceat(weights, starts)
    if even:
        own = weights.reshape(len(starts), -1)
        own -= top[:, None]
    else:
        weights -= top.repeat(lengths.repeat(group))
    np.exp(weights, out=weights)
    total = np.add.reduceat(weights, starts)
    out = torch.embedding_bag(cache.values, index, row_ends[:-1], False, 0, False, scores)[0]
    lse = np.log(total)
    lse += top
    if cuts is None:
        out.div_(torch.from_numpy(total)[:, None])
        return out.view(rows, group, -1), torch.from_numpy(lse).view(rows, group)
    return _summed(out, lse.reshape(-1, group), total.reshape(-1, group), cuts)


def _shares(lengths: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Each length in so many parts, as even as can be."""
    nth, many = _spread(np.zeros_like(cuts), cuts), cuts.repeat(cuts)
    whole = lengths.repeat(cuts)
    return np.asarray((nth + 1) * whole // many - nth * whole // many)


def _spread(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """begin, begin + 1, ... of each, so many."""
    ends = sizes.cumsum()
    return np.asarray(np.arange(ends[-1]) + (begins - ends + sizes).repeat(sizes))


def _in_turns(cells: np.ndarray, sizes: np.ndarray, group: int, even: bool) -> tuple[np.ndarray, np.ndarray]:
    """The cells of each part once for each head of a group, and where those of each head end, after a 0."""
    if even:
        size = len(cells) // len(sizes)
        ends = np.arange(0, len(cells) * group + 1, size, dtype=cells.dtype)
        if group == 1:
            return cells, ends
        return cells.reshape(len(sizes), 1, size).repeat(group, 1).reshape(-1), ends
    each = sizes.repeat(group)
    ends = np.zeros(len(each) + 1, dtype=cells.dtype)
    each.cumsum(out=ends[1:])
    return cells if group == 1 else cells[_spread((sizes.cumsum() - sizes).repeat(group), each)], ends


def _summed(out: torch.Tensor, lse: np.ndarray, total: np.ndarray, cuts: np.ndarray) -> Part:
    """Sums of parts `[parts * group, head_dim]`, not divided by `total` yet, as results of rows of so many parts."""
    group, rows = lse.shape[1], len(cuts)
    first = cuts.cumsum() - cuts
    top = np.maximum.reduceat(lse, first)
    weights = np.exp(lse - top.repeat(cuts, 0))
    whole = np.add.reduceat(weights, first)
    weights /= total * whole.repeat(cuts, 0)
    part, ends = _in_turns(np.arange(len(lse)), cuts, group, False)
    place = part * group + np.arange(rows * group).repeat(cuts.repeat(group)) % group
    own = torch.from_numpy(weights.reshape(-1)[place])
    merged = torch.embedding_bag(out, torch.from_numpy(place), torch.from_numpy(ends[:-1]), False, 0, False, own)[0]
    return merged.view(rows, group, -1), torch.from_numpy(top + np.log(whole))


@functools.cache
def _silence() -> None:
    """Has torch say that its sparse tensors may change, which it says once, to nobody."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = torch.zeros(2, dtype=torch.int32)
        torch.sparse_csr_tensor(ends, ends[:0], torch.zeros(0), (1, 1), check_invariants=False)
