"""Exact attention over a paged key-value cache with gaps: scattered queries, holes in the keys, or both.

As `sliding_window_attention`, with the absolute position of each query given by query_positions. Cost is in proportion
to live tokens: tiles without a present block, and tiles between the windows of far queries, are not visited. Masks,
windows and ALiBi use absolute positions, never compacted ones.
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
    """Attention over a cache with gaps, at the cost of its live tokens only.

    Two cases, alone or together: (1) blocks were evicted from the middle of a cached sequence and their tokens are
    computed again while the blocks behind them are reused: query_positions gives each query's position, and the result
    is that of a full prefill; (2) holes: tokens of blocks that are -1 in the table are not attended to; with a block
    table per KV head, by the query heads of that one.

    The query at position p attends to key position t when t <= p (causal; without it and with a window
    t < p + window), t < seq_len, the block that holds t is present, and (no window, or t > p - window, or
    t < num_sink_tokens).

    Args:
        block_tables: `[num_seqs, max_blocks]` int32, logical block to block number, -1 is a hole; or one table per KV
            head, `[num_seqs, num_kv_heads, max_blocks]`, whose holes and block numbers may differ from head to head.
        query_positions: `[num_tokens]` int32, ascending within a sequence; None: seq_len - q_len + i. With tree_mask,
            depths, in any order: the position at which a query's token stands in its branch.
        tree_mask: `[num_tokens, words]` int32. Bit b of word w of a query's row says whether it attends to the key at
            position seq_len - q_len + 32 * w + b of its sequence, one of this call's own tokens: among these the mask
            alone decides, whatever window and query_positions; keys before them follow the rule above. The ancestors
            of a token come before it, and its own bit is set by the caller.
        query_blocks: `[num_tokens, num_kv_heads, top_k]` int32: the logical blocks that a query attends to, ascending,
            then -1 for none; the rule above holds within them, and tree_mask where it is given. They need no plan.

    Examples:
        >>> cache = torch.randn(8, 16, 2, 64)  # 8 blocks of 16 slots, 2 KV heads
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> query = torch.randn(3, 4, 64)  # a sequence that decodes one token, and the last two of another
        >>> tables = one(5, 1, 7, 0).view(2, 2)
        >>> out = pc.sparse_gap_attention(query, cache, cache, tables, one(20, 32), one(0, 1, 3), one(19, 3, 30), 0.125)
        >>> out.shape
        torch.Size([3, 4, 64])

        A table per KV head: the first has lost the first block of 48 tokens, the second the middle one.

        >>> call = query[:1], cache, cache, one(-1, 5, 2, 7, -1, 2).view(1, 2, 3), one(48), one(0, 1), None, 0.125
        >>> out = pc.sparse_gap_attention(*call)

        A list per query: the first head reads block 0 and the last, the second the last alone.

        >>> table, lists = one(1, 5, 2).view(1, 3), one(0, 2, 2, -1).view(1, 2, 2)
        >>> call = query[:1], cache, cache, table, one(48), one(0, 1), None, 0.125
        >>> out = pc.sparse_gap_attention(*call, query_blocks=lists)

        A tree of three tokens behind 45: two children of the first, at one depth, that do not see each other.

        >>> depths, mask = one(45, 46, 46), one(0b001, 0b011, 0b101).view(3, 1)
        >>> call = query, cache, cache, table, one(48), one(0, 3), depths, 0.125
        >>> out = pc.sparse_gap_attention(*call, tree_mask=mask)
        >>> out.shape
        torch.Size([3, 4, 64])
    """
    return query.new_empty((*query.shape[:2], value_cache.shape[3]))


sparse_gap_attention_with_lse = with_lse(sparse_gap_attention)
