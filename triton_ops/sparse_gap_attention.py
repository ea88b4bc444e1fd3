"""Exact attention over a paged key-value cache with gaps: scattered queries, holes in the keys, or both.

It is `sliding_window_attention` with the absolute position of each query in query_positions. Its time is proportional
to the number of live tokens. The kernel skips tiles without a present block and tiles between the windows of distant
queries. Masks, windows and ALiBi use absolute positions, never compacted ones.
"""

from __future__ import annotations

import torch

from ._attention.operator import attention_operator, with_lse
from .sliding_window_attention import sliding_window_attention


@attention_operator(docs_from=(sliding_window_attention,))
def sparse_gap_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor | None,
    scale: float,
    window: int = 0,
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
    tree_mask: torch.Tensor | None = None,
    query_blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over a cache with gaps, in a time proportional to its live tokens.

    It serves two cases, alone or together:

    - Blocks were evicted from the middle of a cached sequence. Their tokens are computed again, and the blocks after
      them are reused. query_positions has each query's position. The result equals that of a full prefill.
    - Queries must not attend to some blocks, which are -1 in the table. With a block table for each KV head, this holds
      for the query heads of that KV head.

    The query at position p attends to key position t if all of these are true:

    - t <= p if causal, otherwise t < p + window if there is a window.
    - t < seq_len, and the block of t is present.
    - There is no window, or t > p - window, or t < num_sink_tokens.

    Args:
        block_tables: `[num_seqs, max_blocks]` int32, the block number of each logical block. -1 is a hole. Or one table
            for each KV head, `[num_seqs, num_kv_heads, max_blocks]`, whose holes and block numbers may differ.
        query_positions: `[num_tokens]` int32, ascending within a sequence. None: seq_len - q_len + i. With tree_mask,
            in any order: seq_len - q_len plus the depth of the token in its tree, 0 for a root.
        tree_mask: `[num_tokens, words]` int32. Bit b of word w of a query's row says whether it attends to the key at
            position seq_len - q_len + 32 * w + b of its sequence. These are this call's own tokens, and only the mask
            decides about them. Keys before them follow the rule above. Ancestors of a token must come before it.
            Without its own bit, a token does not attend to itself.
        query_blocks: `[num_tokens, num_kv_heads, top_k]` int32, the logical blocks that a query attends to, ascending,
            then -1. The rule above and tree_mask also apply. A call with query_blocks needs no plan.

    Examples:
        >>> cache = torch.randn(8, 16, 2, 64)  # 8 blocks of 16 slots, 2 KV heads
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> query = torch.randn(3, 4, 64)  # the last token of a sequence, and two tokens of another
        >>> tables = one(5, 1, 7, 0).view(2, 2)
        >>> out = pc.sparse_gap_attention(query, cache, cache, tables, one(20, 32), one(0, 1, 3), one(19, 3, 30), 0.125)
        >>> out.shape
        torch.Size([3, 4, 64])

        With a table for each KV head, the first head lacks the first block of 48 tokens, the second the middle one.

        >>> call = query[:1], cache, cache, one(-1, 5, 2, 7, -1, 2).view(1, 2, 3), one(48), one(0, 1), None, 0.125
        >>> out = pc.sparse_gap_attention(*call)

        With a list for each query, the first head reads the first and the last block, the second only the last.

        >>> table, lists = one(1, 5, 2).view(1, 3), one(0, 2, 2, -1).view(1, 2, 2)
        >>> call = query[:1], cache, cache, table, one(48), one(0, 1), None, 0.125
        >>> out = pc.sparse_gap_attention(*call, query_blocks=lists)

        In a tree of three tokens after 45, two children of the first have the same depth and do not see each other.

        >>> depths, mask = one(45, 46, 46), one(0b001, 0b011, 0b101).view(3, 1)
        >>> call = query, cache, cache, table, one(48), one(0, 3), depths, 0.125
        >>> out = pc.sparse_gap_attention(*call, tree_mask=mask)
        >>> out.shape
        torch.Size([3, 4, 64])
    """
    return query.new_empty((*query.shape[:2], value_cache.shape[3]))


sparse_gap_attention_with_lse = with_lse(sparse_gap_attention)
