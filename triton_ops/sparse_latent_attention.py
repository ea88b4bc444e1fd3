"""Attention over a paged cache of latent rows, where each query attends to a part; see `sparse_gap_attention`.

It is `latent_attention` with the position of each query, a window, and lists of the blocks that a query attends to. In
DeepSeek's sparse attention (https://arxiv.org/abs/2512.02556) a query attends to 2,048 tokens, which are passed as
lists of blocks of one token.
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
    """Attend over latent rows with gaps: scattered queries, lists of blocks for each query, or a window.

    The query at position p attends to key position t if all of these are true:

    - t <= p if causal, otherwise t < p + window if there is a window.
    - t < seq_len, and the block of t is present.
    - There is no window, or t > p - window, or t < num_sink_tokens.

    Args:
        query_positions: `[num_tokens]` int32, ascending within a sequence. None: seq_len - q_len + i.
        query_blocks: `[num_tokens, 1, top_k]` int32, the logical blocks that a query attends to, ascending, then -1.
            The rule above also applies. A call with query_blocks needs no plan. To list single tokens of a cache with
            larger blocks, pass `cache.view(-1, 1, head_dim)` and a table of slots.

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
