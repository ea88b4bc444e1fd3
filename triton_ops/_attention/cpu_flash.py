"""PyTorch's flash kernel for CPUs, and merging what it gives for parts of the keys."""

from __future__ import annotations

import math

import numpy as np
import torch

from .cpu_cache import Cache, adjacent, present

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
        values = torch.nn.functional.pad(values, (0, -more))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return (out[..., :width] if more < 0 else out), lse


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Part:
    """`[rows, heads, dim]` over `[keys, kv_heads, dim]`, and the lse `[rows, heads]`."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    q = query.transpose(0, 1)
    if not causal:
        # The queries of a group as rows of one KV head: each key is read once per group.
        q = q.reshape(kv_heads, heads // kv_heads * rows, dim)
    out, lse = flash_kernel(q[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], causal, scale)
    return out.reshape(heads, rows, -1).transpose(0, 1), lse.reshape(heads, rows).transpose(0, 1)


def full_parts(query: torch.Tensor, cache: Cache, table: np.ndarray, begin: int, end: int, scale: float) -> list[Part]:
    """All present keys of [begin, end), no mask: one part where the blocks are adjacent, else one per gather."""
    if end <= begin:
        return []
    size = cache.block_size
    own = table[begin // size : -(-end // size)]
    if adjacent(own):
        keys, values = cache.read(own)
        skip = begin % size
        return [flash(query, keys[skip : skip + end - begin], values[skip : skip + end - begin], scale, False)]
    pieces = present(cache, table, begin, end)
    return [flash(query, piece.keys, piece.values, scale, False) for piece in pieces]


def merge_parts(parts: list[Part], query: torch.Tensor, width: int) -> Part:
    """Parts over disjoint keys, each with at least one key, as one, which may take the first part's memory.

    Args:
        parts: Results and log-sum-exps.
        query: What they are of.
        width: head_dim of the result.
    """
    if not parts:
        out = query.new_zeros((*query.shape[:2], width))
        return out, query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    out, lse = parts[0]
    for other, other_lse in parts[1:]:
        weight = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -math.inf, 0.0)
        out = out.float().lerp_(other.float(), weight[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return out, lse
