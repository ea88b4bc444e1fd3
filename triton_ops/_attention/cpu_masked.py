"""Attention on CPUs: PyTorch's flash kernel, and matrix products for what that kernel does not support.

The flash kernel supports neither score modifiers nor trees. It needs a copy of scattered keys; `attend_in_place` does
not.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from .arguments import AttentionArgs, Result
from .cpu_cache import Cache, Piece

# 64 MB of float32 scores per slice.
MAX_SCORES = 1 << 24
# Keys of a segment. All queries of an entry read one segment before the next, so that a processor's own cache holds it.
_SEGMENT_KEYS = 256
_lock = threading.Lock()


def flash_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> Result:
    """Run PyTorch's flash kernel for CPUs. It takes keys and values of one width, so the narrower ones are padded."""
    if scale <= 0:  # the kernel treats it as positive
        query, scale = query * (-1.0 if scale else 0.0), -scale or 1.0
    width = values.shape[-1]
    more = width - keys.shape[-1]
    if more > 0:
        query, keys = (torch.nn.functional.pad(tensor, (0, more)) for tensor in (query, keys))
    elif more < 0:
        # If values are the first columns of keys, the whole keys are passed as values.
        is_begin = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
        values = keys if is_begin else torch.nn.functional.pad(values, (0, -more))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return (out[..., :width] if more < 0 else out), lse


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Result:
    """Attend with queries `[tokens, heads, dim]` over `[keys, kv_heads, dim]`; the lse is `[tokens, heads]`."""
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    q = query.transpose(0, 1)
    if not causal:
        # The queries of a group are passed as queries of one KV head, so each key is read once for the group.
        q = q.reshape(kv_heads, heads // kv_heads * tokens, dim)
    out, lse = flash_kernel(q[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], causal, scale)
    return out.reshape(heads, tokens, -1).transpose(0, 1), lse.reshape(heads, tokens).transpose(0, 1)


def full_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, begin: int, end: int, scale: float
) -> Iterator[Result]:
    """Yield the results over all present keys of [begin, end), without a mask."""
    pieces = cache.pieces(table, begin, end, views=True, few=len(query) <= 8)
    return (flash(query, keys, values, scale, False) for keys, values, _ in pieces)


def merge_parts(parts: Iterable[Result], query: torch.Tensor, width: int) -> Result:
    """Merge results over disjoint keys. This may overwrite the first result.

    Without parts, return zeros `[..., width]` and an lse of -inf.
    """
    merged: Result | None = None
    for other, other_lse in parts:
        if merged is None:
            merged = other, other_lse
            continue
        out, lse = merged
        both = torch.logaddexp(lse, other_lse)
        safe = both.masked_fill(both == -math.inf, 0.0)
        weights = ((part - safe).exp_()[..., None] for part in (lse, other_lse))
        merged = (out.float().mul_(next(weights)).addcmul_(other.float(), next(weights)), both)
    if merged is None:
        out = query.new_zeros((*query.shape[:2], width))
        return out, query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    return merged


def concatenated(parts: list[Result]) -> Result:
    """Concatenate parts of different queries."""
    return (
        parts[0]
        if len(parts) == 1
        else (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
    )


def attend_masked(
    query: torch.Tensor, cache: Cache, table: np.ndarray, end: int, positions: np.ndarray, args: AttentionArgs
) -> Result:
    """Attend with queries of a sequence over its present keys before `end`, with the predicate as a mask.

    In a causal call without other restrictions, the last queries attend to all keys of a piece, without a mask.
    """
    sink_end, begin, end = args.mask.attended_range(int(positions.min()), int(positions.max()), end)
    out = query.new_zeros((*query.shape[:2], cache.width), dtype=torch.float32)
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    for span in ((0, sink_end), (begin, end)):
        for piece in cache.pieces(table, *span):
            keys, values, t = piece
            live = args.mask.live(t, positions)
            # Queries from `every` on attend to all of the piece, those from `some` on to a part.
            every = len(live)
            if args.terms.PLAIN and not args.mask.BOUNDED:
                whole = live.all(axis=1)
                every = 0 if whole.all() else every - int(whole[::-1].argmin())
            if every < len(live):
                part = flash(query[every:], keys, values, args.scale, False)
                out[every:], lse[every:] = merge_parts([(out[every:], lse[every:]), part], query, cache.width)
            some = slice(int(live.any(axis=1).argmax()), every)
            if live[some].any():
                part = _live_part(query[some], piece, live[some], positions[some], args)
                out[some], lse[some] = merge_parts([(out[some], lse[some]), part], query, cache.width)
    return out, lse


def attend_tree(
    query: torch.Tensor,
    cache: Cache,
    table: np.ndarray,
    seq_len: int,
    positions: np.ndarray,
    own_positions: np.ndarray,
    bits: np.ndarray,
    args: AttentionArgs,
) -> Result:
    """Attend with a sequence's queries, under a tree mask.

    `bits` say to which of the call's own tokens, at `own_positions`, each query attends.
    """
    own_begin = seq_len - len(own_positions)
    sees_all = not args.causal or int(positions.min()) >= own_begin - 1
    if args.terms.PLAIN and not args.mask.BOUNDED and sees_all:
        before = full_parts(query, cache, table, 0, own_begin, args.scale)
    else:
        before = iter([attend_masked(query, cache, table, own_begin, positions, args)])

    def among() -> Iterator[Result]:
        for piece in cache.pieces(table, own_begin, seq_len):
            keys, values, t = piece
            own = t - own_begin
            yield _live_part(query, (keys, values, own_positions[own]), bits[:, own], positions, args)

    return merge_parts(itertools.chain(before, among()), query, cache.width)


def _live_part(
    query: torch.Tensor, piece: Piece, live: np.ndarray, positions: np.ndarray, args: AttentionArgs
) -> Result:
    """Attend over the keys of a piece that at least one query attends to, as `live` says. Other keys may be NaN."""
    keys, values, t = piece
    some = live.any(axis=0)
    if not some.all():
        index = torch.from_numpy(np.flatnonzero(some))
        t, keys, values, live = t[some], keys[index], values[index], live[:, some]
    heads, kv_heads = query.shape[1], keys.shape[1]
    keys, values = keys.float().permute(1, 2, 0), values.float().transpose(0, 1)
    parts, step = [], max(1, MAX_SCORES // max(1, len(t) * heads))
    for begin in range(0, len(query), step):
        rows = slice(begin, begin + step)
        # [KV heads, (heads of a group, rows), features]
        q = query[rows].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        distance, dead = torch.from_numpy(t - positions[rows, None]), torch.from_numpy(~live[rows])
        score = torch.matmul(q, keys).view(heads, *dead.shape).mul_(args.scale)
        score = args.terms.apply(score, distance, args.alibi_slopes).masked_fill_(dead, -math.inf)
        lse = torch.logsumexp(score, -1)
        weight = torch.exp_(score.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]))
        out = torch.matmul(weight.view(*q.shape[:2], len(t)), values).view(heads, len(dead), -1)
        parts.append((out.transpose(0, 1).contiguous(), lse.transpose(0, 1)))
    return concatenated(parts)


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
    (entries, num_queries, width), cuts = query.shape, None
    is_even = int(lengths.min()) * entries == len(vectors)
    if len(vectors) > _SEGMENT_KEYS and int(lengths.max()) > _SEGMENT_KEYS:
        cuts = -(-lengths // _SEGMENT_KEYS)
        nth, segments, each = concatenated_ranges(np.zeros_like(cuts), cuts), cuts.repeat(cuts), lengths.repeat(cuts)
        # The segments are as even as possible.
        lengths = (nth + 1) * each // segments - nth * each // segments
        is_even = int(lengths.min()) * len(lengths) == len(vectors)
        query = query.repeat_interleave(torch.from_numpy(cuts), 0)
    columns, ends = _for_each_query(vectors, lengths, num_queries, is_even)
    starts, index, row_ends = ends[:-1], torch.from_numpy(columns), torch.from_numpy(ends)
    scores = query.new_zeros(len(columns))
    _silence()
    shape = (len(starts), keys.shape[0])
    places = torch.sparse_csr_tensor(row_ends, index, scores, shape, check_invariants=False)
    torch.sparse.sampled_addmm(places, query.reshape(-1, width), keys.t(), beta=0.0, alpha=scale, out=places)
    weights = scores.numpy()
    top = np.maximum.reduceat(weights, starts)
    if is_even:
        of_rows = weights.reshape(len(starts), -1)
        of_rows -= top[:, None]
    else:
        weights -= top.repeat(lengths.repeat(num_queries))
    np.exp(weights, out=weights)
    total = np.add.reduceat(weights, starts)
    out = torch.embedding_bag(values, index, row_ends[:-1], False, 0, False, scores)[0]
    out = out.view(len(lengths), num_queries, -1)
    lse = np.log(total)
    lse += top
    total, lse = total.reshape(-1, num_queries), lse.reshape(-1, num_queries)
    if cuts is None:
        return out.div_(torch.from_numpy(total)[..., None]), torch.from_numpy(lse)
    first = cuts.cumsum() - cuts
    most = np.maximum.reduceat(lse, first)
    weights = np.exp(lse - most.repeat(cuts, 0))
    whole = np.add.reduceat(weights, first)
    weights /= whole.repeat(cuts, 0)
    # There are two steps, so that an entry of one segment has the same bits as without segments.
    out.div_(torch.from_numpy(total)[..., None]).mul_(torch.from_numpy(weights)[..., None])
    entry = torch.from_numpy(np.arange(entries).repeat(cuts))
    return out.new_zeros((entries, *out.shape[1:])).index_add_(0, entry, out), torch.from_numpy(most + np.log(whole))


def concatenated_ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the numbers of all ranges, one range after another: `sizes[i]` numbers from `begins[i]` on."""
    ends = sizes.cumsum()
    return np.asarray(np.arange(sizes.sum()) + (begins - ends + sizes).repeat(sizes))


def _for_each_query(
    vectors: np.ndarray, sizes: np.ndarray, num_queries: int, is_even: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers that each query of each segment reads, one query after another, and offsets into them.

    The offsets begin with 0 and have the end of each query's numbers.
    """
    if is_even:
        size = len(vectors) // len(sizes)
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
