"""Attention of packed queries over a paged cache of latent rows, for multi-head latent attention (MLA).

out[i, h] = sum over live t of softmax_t(score(i, h, t)) * row[t, :value_dim], where

    score = scale * q.row[t];  score = softcap * tanh(score / softcap) if softcap

A key position t is live if the query attends to it.

This is the absorbed form of https://arxiv.org/abs/2405.04434, section 2.1. The caller applies the up-projection of keys
to the queries before the call, and that of values to the results after it. A row is loaded once, as key and as value.
A tile has 16, 32 or 64 rows, each for one query and head. For each tile of a sequence, the kernel reads the tile's
queries and live tokens * head_dim elements. It accumulates in float32.
"""

from __future__ import annotations

import torch

from ._attention.operator import attention_operator, with_lse
from .paged_attention import paged_attention


@attention_operator(docs_from=(paged_attention,))
def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    value_dim: int = 512,
    causal: bool = True,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    plan: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attend over a paged cache of latent rows. All heads use a token's row as key, and its first columns as value.

    The query at position p = seq_len - q_len + i attends to key position t if t < seq_len. The block of t must be
    present. With `causal`, t <= p must also be true. One call takes decodes, several queries of a sequence, chunks, and
    mixes of them.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float16, bfloat16 or float32, with a contiguous last dimension. The
            first columns are queries multiplied by the up-projection of keys, the last ones their rotated part.
            Sequences follow each other. Rows from query_start_loc[-1] on are padding and give 0.
        cache: `[num_blocks, block_size, head_dim]` or `[num_blocks, block_size, 1, head_dim]`, any strides with a
            contiguous last dimension. A row is the normalized latent and then the token's rotated key. It has the
            query's dtype, or float8_e4m3fn or int8 with k_scale. head_dim is a multiple of 16 up to 1024, and 576 in
            DeepSeek's models.
        scale: The factor of q.row, as in the model before absorption. In DeepSeek's models it is (128 + 64) ** -0.5,
            times the factor of the rotary embedding.
        value_dim: The number of a row's columns that are its value, a multiple of 16 below head_dim.
        k_scale: A tensor of one number. A quantized row is read as stored * k_scale, as key and as value.

    Returns:
        `[num_tokens, num_heads, value_dim]`, contiguous, with the query's dtype, before the up-projection of values.
        Rows that attend to no key are 0.

    Examples:
        >>> cache = torch.randn(8, 16, 576)  # 8 blocks of 16 slots: 512 latent columns, then 64 of the rotated key
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> query = torch.randn(3, 16, 576)  # a sequence that decodes one token, and the last two of another
        >>> tables = one(5, 1, 7, 0).view(2, 2)
        >>> out = pc.latent_attention(query, cache, tables, one(20, 32), one(0, 1, 3), 192**-0.5)
        >>> out.shape
        torch.Size([3, 16, 512])
    """
    return query.new_empty((*query.shape[:2], value_dim))


latent_attention_with_lse = with_lse(latent_attention)
