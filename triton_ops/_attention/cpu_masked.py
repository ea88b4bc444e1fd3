"""Queries over keys: PyTorch's flash kernel for CPUs, scores with masks or modifiers, and keys where they lie.

The flash kernel takes neither modifiers nor trees, and of keys that lie scattered it takes a copy.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Iterable, Iterator

import torch

from .._numpy import np
from .call import AttentionCall
from .checks import tree_bits
from .cpu_cache import Cache, Piece, Vectors

# 64 MB of float32 scores per slice.
MAX_SCORES = 1 << 24
# Keys that the queries of an entry take turns over, so that they stay in a processor's own cache.
_TURN_KEYS = 256
_lock = threading.Lock()
Part = tuple[torch.Tensor, torch.Tensor]
"""A result over some of the keys, and its log-sum-exp."""


def flash_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> Part:
    """PyTorch's flash kernel for CPUs, which takes keys and values of one width: the narrower ones are padded."""
    if scale <= 0:  # which it takes for a positive one
        query, scale = query * (-1.0 if scale else 0.0), -scale or 1.0
    width = values.shape[-1]
    more = width - keys.shape[-1]
    if more > 0:
        query, keys = (torch.nn.functional.pad(tensor, (0, more)) for tensor in (query, keys))
    elif more < 0:
        # Values that are the first columns of keys go in whole.
        is_begin = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
        values = keys if is_begin else torch.nn.functional.pad(values, (0, -more))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return (out[..., :width] if more < 0 else out), lse


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Part:
    """`[tokens, heads, dim]` over `[keys, kv_heads, dim]`, and the lse `[tokens, heads]`."""
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    q = query.transpose(0, 1)
    if not causal:
        # The queries of a group as those of one KV head: each key is read once per group.
        q = q.reshape(kv_heads, heads // kv_heads * tokens, dim)
    out, lse = flash_kernel(q[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], causal, scale)
    return out.reshape(heads, tokens, -1).transpose(0, 1), lse.reshape(heads, tokens).transpose(0, 1)


def full_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, begin: int, end: int, scale: float
) -> Iterator[Part]:
    """All present keys of [begin, end) without a mask."""
    pieces = cache.pieces(table, begin, end, views=True, few=len(query) <= 8)
    return (flash(query, piece.keys, piece.values, scale, False) for piece in pieces)


def merge_parts(parts: Iterable[Part], query: torch.Tensor, width: int) -> Part:
    """Parts over disjoint keys as one of `width` features, perhaps in the first's memory; 0 and -inf without one."""
    merged: Part | None = None
    for other, other_lse in parts:
        if merged is None:
            merged = other, other_lse
            continue
        out, lse = merged
        weight = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -math.inf, 0.0)
        merged = out.float().lerp_(other.float(), weight[..., None]), torch.logaddexp(lse, other_lse)
    if merged is None:
        out = query.new_zeros((*query.shape[:2], width))
        return out, query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    return merged


def masked_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, end: int, positions: np.ndarray, call: AttentionCall
) -> Iterator[Part]:
    """Queries of a sequence over its present keys before `end`, with the predicate as a mask."""
    sink_end, begin, end = call.mask.attended_range(int(positions.min()), int(positions.max()), end)
    for span in ((0, sink_end), (begin, end)):
        for piece in cache.pieces(table, *span):
            live = call.mask.live(piece.positions, positions)
            yield _live_part(query, piece, live, positions, call)


def attend_tree(
    query: torch.Tensor,
    cache: Cache,
    table: np.ndarray,
    seq_len: int,
    positions: np.ndarray,
    bits: np.ndarray,
    call: AttentionCall,
) -> Part:
    """The queries of one sequence, whose own tokens attend to one another as `bits` say."""
    own_begin = seq_len - len(query)

    def parts() -> Iterator[Part]:
        sees_all = not call.causal or int(positions.min()) >= own_begin - 1
        if call.terms.PLAIN and not call.mask.BOUNDED and sees_all:
            yield from full_parts(query, cache, table, 0, own_begin, call.scale)
        else:
            yield from masked_parts(query, cache, table, own_begin, positions, call)
        for piece in cache.pieces(table, own_begin, seq_len):
            own = piece.positions - own_begin
            yield _live_part(query, piece, bits[:, own], positions, call, positions[own])

    return merge_parts(parts(), query, cache.width)


def attend_scattered(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, positions: np.ndarray, call: AttentionCall
) -> Part:
    """Queries at ascending positions far apart, without a window: one pass over the keys for all of them."""
    out = query.new_zeros((*query.shape[:2], cache.width), dtype=torch.float32)
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    end = min(seq_len, int(positions[-1]) + 1) if call.causal else seq_len
    for piece in cache.pieces(table, 0, end):
        t = piece.positions
        # Ascending positions: the queries from `some` on see a key of the piece, those from `every` on all of them.
        some, every = (int(np.searchsorted(positions, bound)) if call.causal else 0 for bound in (t[0], t[-1]))
        every = every if call.terms.PLAIN else len(positions)
        for rows, is_masked in ((slice(some, every), True), (slice(every, len(positions)), False)):
            if rows.start == rows.stop:
                continue
            if is_masked:
                live = call.mask.live(t, positions[rows])
                part = _live_part(query[rows], piece, live, positions[rows], call)
            else:
                part = flash(query[rows], piece.keys, piece.values, call.scale, False)
            out[rows], lse[rows] = merge_parts([(out[rows], lse[rows]), part], query, cache.width)
    return out, lse


def attend_united(call: AttentionCall, sequence: int, rows: slice, lists: np.ndarray) -> Part:
    """Queries of a sequence, of a call of one KV head, over the union of their `lists`, masked by whose each is."""
    cache, head = Vectors(call), np.zeros(1, dtype=np.int64)
    query = call.query[rows].to(cache.dtype)
    size, seq_len = call.block_size, int(call.seq_lens[sequence])
    begin, end = call.query_start_loc[sequence : sequence + 2].tolist()
    own_begin = seq_len - (end - begin)
    tokens = np.arange(own_begin, seq_len)
    if call.query_positions is not None:
        tokens = call.query_positions.numpy()[begin:end].astype(np.int64)
    positions, table = tokens[rows.start - begin : rows.stop - begin], call.block_tables.numpy()[sequence]
    chosen = np.zeros((len(lists), len(table) + 1), dtype=bool)
    np.put_along_axis(chosen, np.where(lists < 0, len(table), lists), True, axis=1)
    union = np.flatnonzero(chosen[:, :-1].any(axis=0) & (table >= 0))

    def part(blocks: np.ndarray) -> Part:
        vectors = cache.of_blocks(table[blocks], head).reshape(1, -1)
        keys, values = (x[0][:, None] for x in cache.gather(vectors, head))
        piece = Piece(keys, values, blocks, 0, size)
        t = piece.positions
        live = call.mask.live(t, positions) & (t < seq_len)
        if call.tree_mask is not None:
            # Among the call's own tokens the mask decides, and positions are depths.
            own = np.flatnonzero((t >= own_begin) & (t < seq_len))
            live[:, own] = tree_bits(call.tree_mask[rows], end - begin)[:, t[own] - own_begin]
            t[own] = tokens[t[own] - own_begin]
        live &= np.repeat(chosen[:, blocks], size, axis=1)
        return _live_part(query, piece, live, positions, call, t)

    step = max(1, cache.at_once(1) // size)
    return merge_parts((part(union[b : b + step]) for b in range(0, len(union), step)), query, cache.width)


def _live_part(
    query: torch.Tensor,
    piece: Piece,
    live: np.ndarray,
    positions: np.ndarray,
    call: AttentionCall,
    key_positions: np.ndarray | None = None,
) -> Part:
    """Queries over those keys of a piece that one of them attends to, `live` saying which; the others may be NaN."""
    t, keys, values = piece.positions if key_positions is None else key_positions, piece.keys, piece.values
    some = live.any(axis=0)
    if not some.all():
        index = torch.from_numpy(np.flatnonzero(some))
        t, keys, values, live = t[some], keys[index], values[index], live[:, some]
    step = max(1, MAX_SCORES // max(1, len(t) * query.shape[1]))
    cuts = [slice(b, b + step) for b in range(0, len(query), step)]
    of_keys, of_queries, seen = (torch.from_numpy(array) for array in (t, positions, live))
    parts = [masked_part(query[rows], of_keys, keys, values, of_queries[rows], call, seen[rows]) for rows in cuts]
    return parts[0] if len(parts) == 1 else (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]))


def masked_part(
    query: torch.Tensor,
    t: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    call: AttentionCall,
    live: torch.Tensor,
) -> Part:
    """Queries at `positions` over some keys at t, those of which that are `live`."""
    rows, heads, _ = query.shape
    kv_heads = keys.shape[1]
    # [KV heads, (heads of a group, rows), features]
    q = query.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    score = torch.matmul(q, keys.float().permute(1, 2, 0)).view(heads, rows, -1).mul_(call.scale)
    score = call.terms.apply(score, t - positions[:, None], call.alibi_slopes)
    score.masked_fill_(~live, -math.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp_(score.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]))
    out = torch.matmul(weight.view(kv_heads, heads // kv_heads * rows, len(t)), values.float().transpose(0, 1))
    return out.view(heads, rows, -1).transpose(0, 1).contiguous(), lse.transpose(0, 1)


def attend_in_place(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    vectors: np.ndarray,
    lengths: np.ndarray,
    scale: float,
) -> Part:
    """Queries `[entries, queries, head_dim]` over vectors, at least one an entry, of keys and values in float32.

    A product of matrices at the places of a sparse one, its rows queries and its columns keys, gives scores; a weighted
    sum of rows, made for bags of embeddings, gives results.
    """
    (entries, many, width), cuts = query.shape, None
    is_even = int(lengths.min()) * entries == len(vectors)
    if len(vectors) > _TURN_KEYS and int(lengths.max()) > _TURN_KEYS:
        cuts = -(-lengths // _TURN_KEYS)
        nth, parts, each = spread(np.zeros_like(cuts), cuts), cuts.repeat(cuts), lengths.repeat(cuts)
        # As even as can be.
        lengths = (nth + 1) * each // parts - nth * each // parts
        is_even = int(lengths.min()) * len(lengths) == len(vectors)
        query = query.repeat_interleave(torch.from_numpy(cuts), 0)
    columns, ends = _in_turns(vectors, lengths, many, is_even)
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
        weights -= top.repeat(lengths.repeat(many))
    np.exp(weights, out=weights)
    total = np.add.reduceat(weights, starts)
    out = torch.embedding_bag(values, index, row_ends[:-1], False, 0, False, scores)[0]
    out = out.view(len(lengths), many, -1)
    lse = np.log(total)
    lse += top
    total, lse = total.reshape(-1, many), lse.reshape(-1, many)
    if cuts is None:
        return out.div_(torch.from_numpy(total)[..., None]), torch.from_numpy(lse)
    first = cuts.cumsum() - cuts
    most = np.maximum.reduceat(lse, first)
    weights = np.exp(lse - most.repeat(cuts, 0))
    whole = np.add.reduceat(weights, first)
    weights /= total * whole.repeat(cuts, 0)
    out.mul_(torch.from_numpy(weights)[..., None])
    entry = torch.from_numpy(np.arange(entries).repeat(cuts))
    return out.new_zeros((entries, *out.shape[1:])).index_add_(0, entry, out), torch.from_numpy(most + np.log(whole))


def spread(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """begin, begin + 1, ... of each, so many."""
    ends = sizes.cumsum()
    return np.asarray(np.arange(sizes.sum()) + (begins - ends + sizes).repeat(sizes))


def _in_turns(vectors: np.ndarray, sizes: np.ndarray, many: int, is_even: bool) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of each part once for each of so many queries, and where those of each query end, after a 0."""
    if is_even:
        size = len(vectors) // len(sizes)
        ends = np.arange(0, len(vectors) * many + 1, size, dtype=vectors.dtype)
        return vectors.reshape(len(sizes), 1, size).repeat(many, 1).reshape(-1), ends
    each = sizes.repeat(many)
    ends = np.zeros(len(each) + 1, dtype=vectors.dtype)
    each.cumsum(out=ends[1:])
    return vectors[spread((sizes.cumsum() - sizes).repeat(many), each)], ends


@functools.cache
def _silence() -> None:
    """Has torch say that its sparse tensors may change, once, where no one reads it."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = torch.zeros(2, dtype=torch.int32)
        torch.sparse_csr_tensor(ends, ends[:0], torch.zeros(0), (1, 1), check_invariants=False)
