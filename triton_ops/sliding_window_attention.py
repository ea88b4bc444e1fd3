"""Attention of packed queries over the last `window` tokens, and over sink tokens, of a paged key-value cache.

It is `paged_attention` restricted to t > p - window or t < num_sink_tokens. The kernel visits only tiles inside the
window or with sink tokens. So a decode reads (window + num_sink_tokens) * num_kv_heads * head_dim * 2 elements for each
sequence, however long its context is. Sink tokens are described in https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

import torch

from ._attention.operator import attention_operator, with_lse
from .paged_attention import paged_attention


@attention_operator(docs_from=(paged_attention,))
def sliding_window_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    window: int,
    num_sink_tokens: int = 0,
    causal: bool = True,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    plan: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attend over a sliding window and the first tokens of a paged key-value cache.

    The query at position p = seq_len - q_len + i attends to key position t if all of these are true:

    - t <= p if causal, otherwise t < p + window if there is a window.
    - t < seq_len, and the block of t is present.
    - There is no window, or t > p - window, or t < num_sink_tokens.

    Blocks that no query attends to, such as those before the window, may be -1 in the table.

    Args:
        window: The number of last tokens that a query attends to, its own included. 0: no window. Without `causal`, a
            query also attends to the window - 1 tokens after its own.
        num_sink_tokens: The number of first tokens of a sequence that every query attends to.

    Examples:
        >>> cache = torch.randn(8, 16, 2, 64)  # 8 blocks of 16 slots, 2 KV heads
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> query = torch.randn(3, 4, 64)  # a sequence that decodes one token, and the last two of another
        >>> tables = one(5, 1, 7, 0).view(2, 2)
        >>> out = pc.sliding_window_attention(query, cache, cache, tables, one(20, 32), one(0, 1, 3), 0.125, window=16)
        >>> out.shape
        torch.Size([3, 4, 64])
    """
    return query.new_empty((*query.shape[:2], value_cache.shape[3]))


sliding_window_attention_with_lse = with_lse(sliding_window_attention)
