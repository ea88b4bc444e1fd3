"""Attention of packed queries over the last `window` tokens, and over sink tokens, of a paged key-value cache.

As `paged_attention`, restricted to t > p - window or t < num_sink_tokens. Only tiles inside the window or with sink
tokens are visited: a decode reads (window + num_sink_tokens) * num_kv_heads * head_dim * 2 elements per sequence,
whatever the context's length. Sink tokens: https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

import torch

from ._attention.operator import define_attention

sliding_window_attention_reference, sliding_window_attention_with_lse_reference = define_attention(
    "sliding_window_attention", "float scale, SymInt window, SymInt num_sink_tokens=0"
)


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
    """Attention over a sliding window and the first tokens of a paged key-value cache.

    The query at position p = seq_len - q_len + i attends to key position t when t <= p (causal; without it
    t < p + window), t < seq_len, the block that holds t is present, and t > p - window or t < num_sink_tokens. Blocks
    behind the window may be -1 in the table.

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
        window: How many tokens a query sees, its own included; 0 for no window.
        num_sink_tokens: How many first tokens of a sequence stay visible behind the window.
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
    """
    out: torch.Tensor = torch.ops.pc.sliding_window_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        scale,
        window,
        num_sink_tokens,
        causal,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        max_query_len,
        max_seq_len,
        plan,
        batch_invariant,
    )
    return out


def sliding_window_attention_with_lse(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sliding_window_attention`, and the log-sum-exp of each row's scores for `merge_attention`.

    Returns:
        out as there, and lse `[num_tokens, num_heads]` float32: the natural logarithm of the softmax's denominator,
        sinks included; -inf for a row with nothing to attend to.
    """
    out, lse = torch.ops.pc.sliding_window_attention_with_lse(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        scale,
        window,
        num_sink_tokens,
        causal,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        max_query_len,
        max_seq_len,
        plan,
        batch_invariant,
    )
    return out, lse
