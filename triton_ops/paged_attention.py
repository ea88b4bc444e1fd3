"""Attention of packed queries over a paged key-value cache.

out[i, h] = sum over live t of softmax_t(score(i, h, t)) * value[t, h // group], where

    score = scale * q.k;  score = softcap * tanh(score / softcap) if softcap;  score += alibi_slope * (t - p)

The query is at position p. A key position t is live if the query attends to it.

The kernel reads each query once, and a sequence's live keys and values once for each tile of its queries. It
accumulates in float32.
"""

from __future__ import annotations

import torch

from ._attention.operator import attention_operator, with_lse


@attention_operator()
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
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
    """Attend with packed queries over a paged key-value cache: decodes, prefills, chunks and mixes in one call.

    The query at position p = seq_len - q_len + i attends to key position t if t < seq_len. The block of t must
    be present. With `causal`, t <= p must also be true.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float16, bfloat16 or float32, with a contiguous last dimension.
            Sequences follow each other. Rows from query_start_loc[-1] on are padding and give 0.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides with a contiguous last dimension. It
            has the query's dtype, or float8_e4m3fn or int8 with k_scale.
        value_cache: The values, with the layout and dtype of key_cache. Its head_dim may differ.
        block_tables: `[num_seqs, max_blocks]` int32, the block number of each logical block. -1 is a hole.
        seq_lens: `[num_seqs]` int32, the tokens of each sequence including those of this call.
        query_start_loc: `[num_seqs + 1]` int32, the first row of each sequence's queries.
        scale: The factor of q.k, usually head_dim ** -0.5.
        causal: Whether a query attends only to keys at or before its own position.
        softcap: If positive, a score becomes softcap * tanh(score / softcap).
        alibi_slopes: `[num_heads]`. A score gets slope * (t - p) added.
        sinks: `[num_heads]`, a learned logit for each head, which is added to the softmax's denominator.
        k_scale: A tensor of one number, or of one for each KV head. A quantized key is read as stored * k_scale.
        v_scale: The same for values.
        max_query_len: An upper bound of q_len. None: taken from shapes.
        max_seq_len: An upper bound of seq_lens. None: taken from shapes.
        plan: The plan of `attention_plan` for the same batch. None: the operator builds one.
        batch_invariant: Whether a row's bits must not depend on the rest of the batch or on chunking. No effect on CPU
            tensors.

    Returns:
        `[num_tokens, num_heads, head_dim]` with the values' head_dim, contiguous, with the query's dtype. Rows that
        attend to no key are 0.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, device or option is invalid. For CPU tensors and in debug mode also: a value is invalid.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> cache = torch.randn(8, 16, 2, 64)  # 8 blocks of 16 slots, 2 KV heads
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> query = torch.randn(3, 4, 64)  # a sequence that decodes one token, and the last two of another
        >>> tables = one(5, 1, 7, 0).view(2, 2)
        >>> out = pc.paged_attention(query, cache, cache, tables, one(20, 32), one(0, 1, 3), 0.125)
        >>> out.shape
        torch.Size([3, 4, 64])
    """
    return query.new_empty((*query.shape[:2], value_cache.shape[3]))


paged_attention_with_lse = with_lse(paged_attention)
