"""Compiles the kernels of a model ahead of its first request."""

from __future__ import annotations

import torch

from ._attention.layout import DECODE_QUERIES
from .reshape_and_cache import reshape_and_cache
from .sparse_gap_attention import sparse_gap_attention


def warmup(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
    gaps: bool = False,
    batch_invariant: bool = False,
) -> None:
    """Runs the cache write and the attention of one kind of layer once for each regime, on a few tokens.

    What it compiles serves any batch, any lengths, any table and any number of blocks. Call it once per kind of layer:
    a model that alternates windows calls it with and without one.

    Args:
        num_heads: Query heads of the layer on this device.
        num_kv_heads: KV heads of the layer on this device.
        head_dim: Features of a head.
        block_size: Token slots of a block.
        dtype: Of queries, keys and values.
        cache_dtype: float8_e4m3fn or int8 for a quantized cache; dtype when None.
        device: Where to compile for.
        causal: As for the attention op, like all that follow.
        window: Any positive number compiles for every window.
        softcap: Any positive number compiles for every softcap.
        alibi: Whether the layer passes alibi_slopes.
        sinks: Whether the layer passes sinks.
        gaps: Whether query_positions will be passed as well.
        batch_invariant: Whether that mode will be used.

    Examples:
        >>> pc.warmup(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu")
    """
    device = torch.device(device)
    per_head = torch.zeros(num_heads, dtype=torch.float32, device=device)
    scale = None if cache_dtype is None else torch.ones(1, device=device)
    for q_len in (1, DECODE_QUERIES, 4 * DECODE_QUERIES):
        blocks = -(-q_len // block_size)
        shape = (blocks, block_size, num_kv_heads, head_dim)
        key_cache, value_cache = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if cache_dtype is not None:
            key_cache, value_cache = key_cache.to(cache_dtype), value_cache.to(cache_dtype)
        key = torch.zeros(q_len, num_kv_heads, head_dim, dtype=dtype, device=device)
        slots = torch.arange(q_len, device=device)
        reshape_and_cache(key, key, key_cache, value_cache, slots, scale, scale)
        numbers = torch.arange(max(blocks, q_len), dtype=torch.int32, device=device)
        for positions in (None, numbers[:q_len]) if gaps else (None,):
            sparse_gap_attention(
                torch.zeros(q_len, num_heads, head_dim, dtype=dtype, device=device),
                key_cache,
                value_cache,
                numbers[None, :blocks],
                torch.tensor([q_len], dtype=torch.int32, device=device),
                torch.tensor([0, q_len], dtype=torch.int32, device=device),
                positions,
                1.0,
                window=window,
                causal=causal,
                softcap=softcap,
                alibi_slopes=per_head if alibi else None,
                sinks=per_head if sinks else None,
                k_scale=scale,
                v_scale=scale,
                max_query_len=q_len,
                batch_invariant=batch_invariant,
            )
