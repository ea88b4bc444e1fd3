"""What PyTorch's flash kernel cannot express: scores with a mask or a term of their own, in slices of bounded size."""

from __future__ import annotations

import math

import numpy as np
import torch
from einops import rearrange

from .call import AttentionCall
from .cpu_cache import Cache, Piece, present
from .cpu_flash import Part, flash, full_parts, merge_parts

# 64 MB of float32 scores per slice.
MAX_SCORES = 1 << 24


def attend_masked(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, call: AttentionCall
) -> Part:
    """A slice of a run with the predicate as a mask."""
    rows = query.shape[0]
    sink_end, begin, end = call.mask.reach(position, position + rows - 1, seq_len)
    pieces = [piece for b, e in ((0, sink_end), (begin, end)) for piece in present(cache, table, b, e)]
    if not pieces:
        return merge_parts([], query, cache.width)
    t = np.concatenate([piece.positions for piece in pieces])
    keys = torch.cat([piece.keys for piece in pieces])
    values = torch.cat([piece.values for piece in pieces])
    return masked_part(query, t, keys, values, np.arange(position, position + rows), call)


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
    own_begin = max(0, seq_len - len(positions))
    parts: list[Part] = []
    sees_all = not call.causal or int(positions.min()) >= own_begin - 1
    if call.terms.PLAIN and not call.mask.BOUNDED and sees_all:
        parts += full_parts(query, cache, table, 0, own_begin, call.scale)
    else:
        sink_end, begin, end = call.mask.reach(int(positions.min()), int(positions.max()), own_begin)
        for span in ((0, sink_end), (begin, end)):
            for piece in present(cache, table, *span):
                live = call.mask.live(piece.positions, positions)
                parts.append(live_part(query, piece, live, positions, call))
    for piece in present(cache, table, own_begin, seq_len):
        own = piece.positions - own_begin
        parts.append(live_part(query, piece, bits[:, own], positions, call, positions[own]))
    return merge_parts(parts, query, cache.width)


def live_part(
    query: torch.Tensor,
    piece: Piece,
    live: np.ndarray,
    positions: np.ndarray,
    call: AttentionCall,
    key_positions: np.ndarray | None = None,
) -> Part:
    """Queries over those keys of a piece that one of them attends to, `live` saying which; the others may be NaN."""
    some = live.any(axis=0)
    t = (piece.positions if key_positions is None else key_positions)[some]
    index = torch.from_numpy(np.flatnonzero(some))
    keys, values = piece.keys[index], piece.values[index]
    step = max(1, MAX_SCORES // max(1, len(t) * query.shape[1]))
    parts = []
    for b in range(0, len(query), step):
        rows = slice(b, b + step)
        parts.append(masked_part(query[rows], t, keys, values, positions[rows], call, live[rows][:, some]))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def masked_part(
    query: torch.Tensor,
    key_positions: np.ndarray,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: np.ndarray,
    call: AttentionCall,
    live: np.ndarray | None = None,
) -> Part:
    """Queries at `positions` over some keys, with the predicate as a mask, or what is `live`."""
    rows, heads, _ = query.shape
    t, p = torch.from_numpy(key_positions), torch.from_numpy(positions)[:, None]
    kv_heads = keys.shape[1]
    q = rearrange(query.float(), "row (kv group) dim -> kv (group row) dim", kv=kv_heads)
    score = torch.matmul(q, rearrange(keys.float(), "key kv dim -> kv dim key")).view(heads, rows, -1).mul_(call.scale)
    score = call.terms.apply(score, t - p, call.alibi_slopes)
    dead = torch.from_numpy(~(call.mask.live(key_positions, positions) if live is None else live))
    score.masked_fill_(dead, -math.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp_(score.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]))
    out = torch.matmul(
        weight.view(kv_heads, heads // kv_heads * rows, len(t)), rearrange(values.float(), "key kv dim -> kv key dim")
    )
    return rearrange(out, "kv (group row) dim -> row (kv group) dim", row=rows), lse.transpose(0, 1)


def attend_scattered(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, positions: np.ndarray, call: AttentionCall
) -> Part:
    """Queries at ascending positions far apart, without a window: one pass over the keys for all of them."""
    plain = call.terms.PLAIN
    out = query.new_zeros((*query.shape[:2], cache.width), dtype=torch.float32)
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    end = min(seq_len, int(positions[-1]) + 1) if call.causal else seq_len
    for piece in present(cache, table, 0, end):
        t, keys, values = piece.positions, piece.keys, piece.values
        # Ascending positions: the queries from `some` on see a key of the piece, those from `every` on all of them.
        some, every = (int(np.searchsorted(positions, bound)) if call.causal else 0 for bound in (t[0], t[-1]))
        every = every if plain else len(positions)
        step = max(1, MAX_SCORES // (len(t) * query.shape[1]))
        cuts = [slice(b, min(b + step, every)) for b in range(some, every, step)]
        parts = [(rows, masked_part(query[rows], t, keys, values, positions[rows], call)) for rows in cuts]
        if every < len(positions):
            rows = slice(every, len(positions))
            parts.append((rows, flash(query[rows], keys, values, call.scale, False)))
        for rows, part in parts:
            out[rows], lse[rows] = merge_parts([(out[rows], lse[rows]), part], query, cache.width)
    return out, lse
