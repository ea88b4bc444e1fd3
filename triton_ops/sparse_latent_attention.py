"""Attention over a paged cache of latent rows of which each query attends to a part; see `sparse_gap_attention`.

As `latent_attention`, with the position of each query, a window, and lists of the blocks that it attends to: DeepSeek's
sparse attention (https://arxiv.org/abs/2512.02556) takes 2,048 tokens a query, which are lists of blocks of one token.
"""

from __future__ import annotations

import torch

from ._attention.operator import attention_operator, with_lse
from .latent_attention import latent_attention
from .sparse_gap_attention import sparse_gap_attention


@attention_operator(docs_from=(latent_attention, sparse_gap_attention))
def sparse_latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor | None,
    scale: float,
    value_dim: int = 512,
    window: int = 0,
    num_sink_tokens: int = 0,
    causal: bool = True,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    plan: torch.Tensor | None = None,
    batch_invariant: bool = False,
    query_blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over latent rows with gaps: queries anywhere in a sequence, blocks that each of them chose, a window.

    The query at position p attends to key position t when t <= p (causal; without it and with a window
    t < p + window), t < seq_len, the block that holds t is present, and (no window, or t > p - window, or
    t < num_sink_tokens).

    Args:
        query_positions: `[num_tokens]` int32, ascending within a sequence; None: seq_len - q_len + i.
        query_blocks: `[num_tokens, 1, top_k]` int32: the logical blocks that a query attends to, ascending, then -1 for
            none; the rule above holds within them. They need no plan. Tokens of a cache of larger blocks are blocks of
            `cache.view(-1, 1, head_dim)`, whose table holds slots.

    Examples:
        >>> cache = torch.randn(8, 16, 576)  # 8 blocks of 16 slots: 512 latent columns, then 64 of the rotated key
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> query, lists = torch.randn(1, 16, 576), one(0, 2).view(1, 1, 2)  # of three blocks the first and the last
        >>> batch = one(5, 1, 7).view(1, 3), one(48), one(0, 1)
        >>> out = pc.sparse_latent_attention(query, cache, *batch, None, 192**-0.5, query_blocks=lists)
        >>> out.shape
        torch.Size([1, 16, 512])
    """
    return query.new_empty((*query.shape[:2], value_dim))


sparse_latent_attention_with_lse = with_lse(sparse_latent_attention)
