"""Attention on CPUs: PyTorch's flash kernel, and matrix products for score modifiers, which it does not support."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ..merge_attention import merge_pair
from .arguments import AttentionArgs, Result
from .cpu_cache import Cache, Piece

# 64 MB of float32 scores per slice.
MAX_SCORES = 1 << 24


def flash_kernel(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> Result:
    """Run PyTorch's flash kernel for CPUs. It takes keys and values of one width, so the narrower ones are padded.

    `mask` is added to the scores.
    """
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


def flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    dead: torch.Tensor | None = None,
) -> Result:
    """Attend with queries `[tokens, heads, dim]` over `[keys, kv_heads, dim]`; the lse is `[tokens, heads]`.

    If not causal, `dead` `[tokens, keys]` may say to which keys a query does not attend. The results of a query without
    keys are undefined, and its lse is -inf.
    """
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    q, mask = query.transpose(0, 1), None
    if not causal:
        # The queries of a group are passed as queries of one KV head, so each key is read once for the group.
        q = q.reshape(kv_heads, heads // kv_heads * tokens, dim)
    if dead is not None:
        mask = q.new_zeros(dead.shape).masked_fill_(dead, -math.inf).repeat(heads // kv_heads, 1)[None, None]
    out, lse = flash_kernel(q[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], causal, scale, mask)
    out, lse = out.reshape(heads, tokens, -1).transpose(0, 1), lse.reshape(heads, tokens).transpose(0, 1)
    if dead is not None:
        lse[dead.all(dim=1)] = -math.inf  # the kernel gives 0
    return out, lse


def full_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, begin: int, end: int, scale: float
) -> Iterator[Result]:
    """Yield the results over all present keys of [begin, end), without a mask."""
    pieces = cache.pieces(table, begin, end, views=True)
    return (flash(query, keys, values, scale, False) for keys, values, _ in pieces)


def merge_parts(parts: Iterable[Result], query: torch.Tensor, width: int) -> Result:
    """Merge results over disjoint keys.

    Without parts, return zeros `[..., width]` and an lse of -inf.
    """
    merged: Result | None = None
    for part in parts:
        merged = part if merged is None else merge_pair(*merged, *part)
    if merged is None:
        out = query.new_zeros((*query.shape[:2], width))
        return out, query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    return merged


def concatenated(parts: list[Result]) -> Result:
    """Concatenate parts of different queries."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


Tree = tuple[np.ndarray, np.ndarray]
"""The positions of a sequence's tokens in this call, its last ones, and to which of them each query attends."""


def attend_masked(
    query: torch.Tensor,
    cache: Cache,
    table: np.ndarray,
    seq_len: int,
    positions: np.ndarray,
    args: AttentionArgs,
    tree: Tree | None = None,
) -> Result:
    """Attend with queries of a sequence over its present keys, with the predicate as a mask."""
    sink_end, begin, end = args.mask.attended_range(int(positions.min()), int(positions.max()), seq_len)
    own_begin = seq_len
    if tree is not None:
        own_begin, end = seq_len - len(tree[0]), seq_len
        begin = min(begin, own_begin)
        sink_end = min(sink_end, begin)
    out = query.new_zeros((*query.shape[:2], cache.width), dtype=torch.float32)
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    for span in ((0, sink_end), (begin, end)):
        for keys, values, t in cache.pieces(table, *span):
            live = args.mask.live(t, positions)
            if tree is not None:
                own = t[t >= own_begin] - own_begin
                before = len(t) - len(own)
                live[:, before:], t[before:] = tree[1][:, own], tree[0][own]
            rows = slice(int(live.any(axis=1).argmax()), len(live))  # the queries before attend to none of the piece
            if live[rows].any():
                part = _live_part(query[rows], (keys, values, t), live[rows], positions[rows], args)
                out[rows], lse[rows] = merge_parts([(out[rows], lse[rows]), part], query, cache.width)
    return out, lse


def _live_part(
    query: torch.Tensor, piece: Piece, live: np.ndarray, positions: np.ndarray, args: AttentionArgs
) -> Result:
    """Attend over the keys of a piece that at least one query attends to, as `live` says. Other keys may be NaN."""
    keys, values, t = piece
    some = live.any(axis=0)
    if not some.all():
        index = torch.from_numpy(np.flatnonzero(some))
        t, keys, values, live = t[some], keys[index], values[index], live[:, some]
    if not args.terms.PLAIN:
        keys, values = keys.float(), values.float()
    parts, step = [], max(1, MAX_SCORES // max(1, len(t) * query.shape[1]))
    for begin in range(0, len(query), step):
        rows = slice(begin, begin + step)
        dead = torch.from_numpy(~live[rows])
        if args.terms.PLAIN:
            parts.append(flash(query[rows], keys, values, args.scale, False, dead if dead.any() else None))
        else:
            distance = torch.from_numpy(t - positions[rows, None])
            parts.append(_with_modifiers(query[rows], keys, values, distance, dead, args))
    return concatenated(parts)


def _with_modifiers(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    distance: torch.Tensor,
    dead: torch.Tensor,
    args: AttentionArgs,
) -> Result:
    """Attend like `flash` over float32 keys and values, with score modifiers.

    `distance` and `dead` are `[queries, keys]`.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    # [KV heads, (heads of a group, queries), features]
    q = query.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    score = torch.matmul(q, keys.permute(1, 2, 0)).view(heads, *dead.shape).mul_(args.scale)
    score = args.terms.apply(score, distance, args.alibi_slopes).masked_fill_(dead, -math.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp_(score.sub_(lse[..., None]))
    out = torch.matmul(weight.view(*q.shape[:2], -1), values.transpose(0, 1)).view(heads, len(dead), -1)
    return out.transpose(0, 1).contiguous(), lse.transpose(0, 1)
