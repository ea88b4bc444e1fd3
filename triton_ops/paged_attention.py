"""Attention of packed queries over a paged key-value cache.

out[i, h] = sum over live t of softmax_t(score(i, h, t)) * value[t, h // group], where

    score = scale * q.k;  score = softcap * tanh(score / softcap) if softcap;  score += alibi_slope * (t - p)

Reads q_len * num_heads * head_dim + live tokens * num_kv_heads * head_dim * 2 elements per sequence and query tile;
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
    """Attention of packed queries over a paged key-value cache: decode, prefill, chunks and mixes in one call.

    The query at position p = seq_len - q_len + i attends to key position t when t <= p (causal), t < seq_len and the
    block that holds t is present.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float16, bfloat16 or float32; contiguous last dimension. Sequences
            follow each other; rows past query_start_loc[-1] are padding and give 0.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides with a contiguous last dimension;
            the query's dtype, or float8_e4m3fn or int8 with k_scale.
        value_cache: Like key_cache.
        block_tables: `[num_seqs, max_blocks]` int32, logical block to block number; -1 is a hole.
        seq_lens: `[num_seqs]` int32, tokens of each sequence including those of this call.
        query_start_loc: `[num_seqs + 1]` int32, where each sequence's queries begin.
        scale: Factor on q.k, usually head_dim ** -0.5.
        causal: Whether a query sees only keys at or before its own position.
        softcap: score becomes softcap * tanh(score / softcap) when positive.
        alibi_slopes: `[num_heads]`; adds slope * (t - p) to a score.
        sinks: `[num_heads]`, a learned logit per head that joins the softmax's denominator.
        k_scale: One float or one per KV head; a quantized key is read as stored * k_scale.
        v_scale: The same for values.
        max_query_len: Upper bound of q_len known on the host; taken from shapes when None.
        max_seq_len: Upper bound of seq_lens known on the host; taken from shapes when None.
        plan: From `attention_plan` for the same batch; the op plans by itself when None.
        batch_invariant: Makes each row's bits independent of the rest of the batch and of chunking.

    Returns:
        `[num_tokens, num_heads, head_dim]`, contiguous, the query's dtype. Rows with nothing to attend to are 0.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape, device or option; on CPU tensors and in debug mode also a wrong value.
        RuntimeError: A tensor that requires grad while grad mode is on.

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
