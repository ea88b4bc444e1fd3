"""The functions of FlashAttention, computed by this package's operators, forward only.

Arguments have the names, order, shapes and meanings of FlashAttention 2.8
(https://github.com/Dao-AILab/flash-attention). Arguments that FlashAttention 3 and its forks for serving add are
keyword-only. The operators read packed queries, and keys and values in blocks. Dense keys and values are viewed as
blocks, with block tables that depend only on their sizes (`_attention/dense.py`).

The metadata of a call decide its views, its tables and its operator. Each `_build_...` function below chooses them once
for all calls of a kind, and returns a function that runs these calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._attention.dense import arange_i32, build_blocks, build_packed_tables, full_i32, strided_block_table
from ._attention.layout import PlanShape
from ._core.cache import checks_values
from ._core.checks import (
    CACHE_LAYOUT,
    INT32,
    bad_argument,
    check_integer,
    check_tensor,
    describe,
    lowest_entry,
    reads_values,
)
from ._flash.append import build_append
from ._flash.arguments import (
    FlashArgs,
    Run,
    bound,
    call_context,
    check_partial,
    check_starts,
    check_tensors,
    contiguous,
    flag,
    flash_launch,
    known,
    options_of,
    packed,
    pair,
    shaped,
)
from ._flash.attend import build_attend, with_plan
from ._flash.paged_kv import PagedKV, check_used, pack_used, without_leftpad
from .attention_plan import attention_plan

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def _with_probabilities(found: Any) -> Any:
    """Return (out, lse, an empty tensor). FlashAttention 2 returns probabilities in its place, to test its dropout."""
    return (*found, found[0].new_empty(0))


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Compute attention for a batch of sequences of one length, like FlashAttention's `flash_attn_func`; forward only.

    The query with index i has position p = i + seqlen_k - seqlen_q (the mask is aligned to the bottom right). It
    attends to keys p - window_size[0] to p + window_size[1]. -1 means no bound, and causal means window_size[1] = 0. A
    row without keys gives 0, and lse -inf or, with s_aux, its sink.

    k and v are read in place with any strides, if their last dimension is contiguous. They are copied if there are
    several sequences and, in memory, only one of k and v has heads before tokens.

    Args:
        q: `[batch, seqlen_q, num_heads, head_dim]`, float16, bfloat16, float32, or float8_e4m3fn (out is then
            bfloat16).
        k: `[batch, seqlen_k, num_kv_heads, head_dim]`, the same dtype; or float8_e4m3fn or int8.
        v: Like k, but its head_dim may differ.
        dropout_p: Must be 0.
        softmax_scale: Factor on q.k. None: head_dim ** -0.5.
        causal: Whether a query ignores the keys after its position.
        window_size: Number of keys before and after its position that a query attends to.
        softcap: If positive, a score becomes softcap * tanh(score / softcap).
        alibi_slopes: `[num_heads]`, or `[batch, num_heads]` with slopes for each sequence. Adds -slope * abs(t - p) to
            the score of key t. Slopes for each sequence cost one operator call for each. If queries attend to later
            keys, every call runs twice.
        deterministic: No effect: the same call always gives the same bits.
        return_attn_probs: Whether to return (out, lse, an empty tensor), like FlashAttention 2 without dropout.
        s_aux: `[num_heads]`, a learned logit for each head that is added to the softmax's denominator (attention
            sinks).
        q_descale: `[batch, num_kv_heads]`, `[num_kv_heads]` or one element, factor of a quantized q; ignored for other
            dtypes.
        k_descale: The same for k.
        v_descale: The same for v.
        qv: `[batch, seqlen_q, num_heads, head_dim of v]`, a second part of the queries, for MLA. A score is then
            softmax_scale * (q.k + qv.v), and the default of softmax_scale is (head_dim + head_dim of v) ** -0.5. qv
            needs one KV head. A window, alibi_slopes, s_aux and quantization are refused. If v and k are in one row, in
            this order, they are read in place.
        attention_chunk: If positive, a query attends only to keys in its own chunk of this many positions.
        num_splits: No effect, like pack_gqa and sm_margin: this package decides how the work is split.
        pack_gqa: No effect.
        sm_margin: No effect.
        return_softmax_lse: Whether to return (out, lse).
        out: `[batch, seqlen_q, num_heads, head_dim of v]`, float16, bfloat16 or float32, which is written to and
            returned.

    Returns:
        out `[batch, seqlen_q, num_heads, head_dim of v]`. If asked for, also the lse `[batch, num_heads, seqlen_q]`
        float32, a natural logarithm that includes sinks.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is wrong, or an option is not supported.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> from pc.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(2, 3, 8, 64), torch.randn(2, 10, 2, 64), torch.randn(2, 10, 2, 64)
        >>> flash_attn_func(q, k, v, causal=True, window_size=(4, 0)).shape
        torch.Size([2, 3, 8, 64])
    """
    with_lse = flag("return_attn_probs", return_attn_probs) or return_softmax_lse
    options = options_of(softmax_scale, causal, window_size, softcap, with_lse, attention_chunk, dropout_p)
    args = FlashArgs(
        *options, call_context(q), q, k, v, alibi_slopes=alibi_slopes, s_aux=s_aux, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, qv=qv, out=out,
    )  # fmt: skip
    found = _run_dense(args)
    return _with_probabilities(found) if return_attn_probs else found


def _build_dense(args: FlashArgs) -> Run:
    """Return a function that runs calls of `flash_attn_func` of this kind."""
    q, k, v, layout = args.q, args.k, args.v, "[batch, seqlen, heads, head_dim]"
    check_tensors({"q": (q, layout), "k": (k, layout), "v": (v, layout)}, args)
    batch, seqlen_q, seqlen_k, device = *q.shape[:2], k.shape[1], q.device
    for name, x in (("k", k), ("v", v)):
        if x.shape[:2] != (batch, seqlen_k):
            raise bad_argument(name, describe(x), f"[{batch}, {seqlen_k}, num_kv_heads, head_dim] on {device}")
    blocks_of = build_blocks(contiguous(k), contiguous(v), batch)
    lens, starts = full_i32(device, batch, seqlen_k), arange_i32(device, batch + 1, seqlen_q)
    shape = (batch, seqlen_q)

    def keys_of(args: FlashArgs) -> PagedKV:
        blocks = blocks_of(contiguous(args.k), contiguous(args.v))
        return PagedKV(*blocks, lens, starts, seqlen_q, seqlen_k, seqlen_q > seqlen_k)

    attend = build_attend(packed(q), keys_of(args), args)
    return lambda args: shaped(attend(packed(args.q), keys_of(args), args), shape, args.out)


_run_dense = flash_launch("flash_attn_func", _build_dense, {"seq_lens": "k", "query_start_loc": "q"})


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    fa_version: int = 2,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Compute attention for packed sequences, like FlashAttention's `flash_attn_varlen_func` and vLLM's; forward only.

    Masks, errors and arguments that are not explained here are those of `flash_attn_func`.

    Args:
        q: `[total_q, num_heads, head_dim]`, one sequence after another. Rows after the last sequence give 0.
        k: `[total_k, num_kv_heads, head_dim]`, read in place; with block_table `[num_blocks, block_size, num_kv_heads,
            head_dim]`, a paged cache with any block size and strides.
        v: Like k.
        cu_seqlens_q: `[batch + 1]` int32, start of each sequence's queries.
        cu_seqlens_k: `[batch + 1]` int32, the same for keys. With block_table only their differences count. None if
            seqused_k and block_table are given.
        max_seqlen_q: Upper bound for a sequence's queries. None: all queries. Reading a tensor synchronizes.
        max_seqlen_k: The same for keys.
        block_table: `[batch, max_blocks]` int32, block numbers of each sequence.
        seqused_q: `[batch]` int32, number of first queries of each sequence that count, at most all of them. Others
            give 0 and lse -inf.
        seqused_k: `[batch]` int32, number of keys of each sequence, instead of cu_seqlens_k's differences.
        scheduler_metadata: A plan of `get_scheduler_metadata`. A plan that does not fit is ignored.
        fa_version: No effect.
        out: `[total_q, num_heads, head_dim of v]`, which is written to and returned.

    Returns:
        out `[total_q, num_heads, head_dim of v]`. If asked for, also the lse `[num_heads, total_q]` float32.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is wrong, or an option is not supported.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> from pc.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(5, 8, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)
        >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)  # sequences of 2 and of 3 tokens
        >>> flash_attn_varlen_func(q, k, v, starts, starts, 3, 3, causal=True).shape
        torch.Size([5, 8, 64])
    """
    with_lse = flag("return_attn_probs", return_attn_probs) or return_softmax_lse
    same, unpack = cu_seqlens_k is cu_seqlens_q and seqused_q is None, None
    if seqused_q is not None and isinstance(q, torch.Tensor) and q.dim() == 3:
        check_starts("cu_seqlens_q", cu_seqlens_q, q.device)
        if cu_seqlens_q.shape[0] > 1:
            cu_seqlens_q, pack, unpack = pack_used(q.shape[0], cu_seqlens_q, seqused_q)
            q, qv, scheduler_metadata = pack(q), pack(qv) if isinstance(qv, torch.Tensor) else qv, None
    needs_lse = unpack is not None or with_lse
    options = options_of(softmax_scale, causal, window_size, softcap, needs_lse, attention_chunk, dropout_p)
    max_seqlen_q, max_seqlen_k = bound("max_seqlen_q", max_seqlen_q), bound("max_seqlen_k", max_seqlen_k)
    args = FlashArgs(
        *options, call_context(q), q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=None if same else cu_seqlens_k,
        seqused_k=seqused_k, block_table=block_table, scheduler_metadata=scheduler_metadata, alibi_slopes=alibi_slopes,
        s_aux=s_aux, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, qv=qv, out=out,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, same_starts=same,
    )  # fmt: skip
    found = _run_packed(args)
    if unpack is not None:
        result, lse = unpack(*found)
        result = result if out is None else out.copy_(result)
        found = (result, lse) if with_lse else result
    return _with_probabilities(found) if return_attn_probs else found


def _build_packed(args: FlashArgs) -> Run:
    """Return a function that runs calls of `flash_attn_varlen_func` of this kind."""
    q, k, same, paged = args.q, args.k, args.same_starts, args.block_table is not None
    layout = CACHE_LAYOUT if paged else "[total_k, num_kv_heads, head_dim]"
    check_tensors({"q": (q, "[total_q, num_heads, head_dim]"), "k": (k, layout), "v": (args.v, layout)}, args)
    if args.cu_seqlens_k is None and not same and (args.seqused_k is None or not paged):
        raise bad_argument("cu_seqlens_k", "None", "[batch + 1] int32; or seqused_k and block_table")
    check_starts("cu_seqlens_q", args.cu_seqlens_q, q.device)
    if args.cu_seqlens_k is not None:
        check_starts("cu_seqlens_k", args.cu_seqlens_k, q.device)
    for name, layout in (("seqused_k", "[batch]"), ("block_table", "[batch, max_blocks]")):
        if getattr(args, name) is not None:
            check_tensor(name, getattr(args, name), layout, INT32, q.device, (args.cu_seqlens_q.shape[0] - 1,))
    max_queries = q.shape[0] if args.max_seqlen_q is None else args.max_seqlen_q
    max_keys = k.shape[0] if args.max_seqlen_k is None and not paged else args.max_seqlen_k
    begins = args.cu_seqlens_q if same else args.cu_seqlens_k
    fewer_keys, tables_of = not same or args.seqused_k is not None, None
    if begins is not None and (not paged or args.seqused_k is None):
        tables_of = build_packed_tables(begins, 0 if paged or max_keys is None else max_keys)

    def keys_of(args: FlashArgs) -> PagedKV:
        begins: Any = args.cu_seqlens_q if same else args.cu_seqlens_k
        tables, lens, k, v = args.block_table, args.seqused_k, contiguous(args.k), contiguous(args.v)
        if not paged:
            check_used("seqused_k", lens, "cu_seqlens_k", begins, k.shape[0])
            k, v = k.unsqueeze(1), v.unsqueeze(1)
        if tables_of is not None:
            own, differences = tables_of(begins)
            tables, lens = own if tables is None else tables, differences if lens is None else lens
        keys = PagedKV(k, v, tables, lens, args.cu_seqlens_q, max_queries, max_keys, fewer_keys)
        return with_plan(keys, args)

    attend = build_attend(contiguous(q), keys_of(args), args)
    return lambda args: shaped(attend(contiguous(args.q), keys_of(args), args), None, args.out)


_run_packed = flash_launch("flash_attn_varlen_func", _build_packed, {})


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: torch.Tensor | None = None,
) -> Any:
    """Write new keys and values to a cache and attend to it, like FlashAttention's `flash_attn_with_kvcache`.

    New keys go to positions cache_seqlens, cache_seqlens + 1, ... of their sequences. If rotary_cos is given, they are
    rotated for these positions. Queries are then rotated too. With a causal mask or a window they have the same
    positions as the new keys; otherwise all have position cache_seqlens. No value on the device is read, so a CUDA
    graph can capture the call. Masks, errors and arguments that are not explained here are those of `flash_attn_func`.

    Args:
        q: `[batch, seqlen_q, num_heads, head_dim]`; with cu_seqlens_q `[total_q, num_heads, head_dim]`.
        k_cache: `[batch of the cache, seqlen_cache, num_kv_heads, head_dim]`, or with block_table `[num_blocks,
            block_size, num_kv_heads, head_dim]`; any strides with a contiguous last dimension. It has the dtype of q,
            or float8_e4m3fn or int8 with k_descale.
        v_cache: Like k_cache, but its head_dim may differ.
        k: `[batch, seqlen_new, num_kv_heads, head_dim]`, new keys to write; with cu_seqlens_k_new `[total_new,
            num_kv_heads, head_dim]`.
        v: Like k.
        rotary_cos: `[max_positions, rotary_dim / 2]`, cosines; only with k.
        rotary_sin: The same for sines.
        cache_seqlens: `[batch]` int32 or one int, number of keys in the cache before this call. None: the cache is
            full.
        cache_batch_idx: `[batch]` int32, the sequence of a dense cache, or the row of block_table, for each sequence of
            the batch. None: in order.
        cache_leftpad: `[batch]` int32, start of each sequence in the cache. None: 0.
        block_table: `[batch, max_blocks]` int32, block numbers of each sequence; -1: no block. With cache_batch_idx it
            may have more rows than the batch.
        rotary_interleaved: Whether pairs of features are (2i, 2i + 1); otherwise (i, i + rotary_dim / 2).
        page_table: Another name for block_table.
        cu_seqlens_q: `[batch + 1]` int32, start of each sequence's queries in a packed q.
        max_seqlen_q: Upper bound for a packed sequence's queries. None: all queries.
        cu_seqlens_k_new: `[batch + 1]` int32, start of each sequence's new keys in a packed k.
        rotary_seqlens: `[batch]` int32, positions of the first new tokens for the rotation. None: cache_seqlens.
        k_descale: `[batch, num_kv_heads]`, factor of a quantized k_cache. New keys are divided by it; with new keys it
            must be the same for all sequences.
        v_descale: The same for v_cache.
        scheduler_metadata: A plan of `get_scheduler_metadata`. A plan that does not fit is ignored.
        out: A tensor like the result, which is written to and returned.

    Returns:
        out like q, with the head_dim of v_cache. If asked for, also the lse `[batch, num_heads, seqlen_q]` float32, or
        `[num_heads, total_q]` if packed.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is wrong, or an option is not supported.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> from pc.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 4, 32, 2, 64).unbind()  # 4 sequences of at most 32 tokens
        >>> q, k, v = torch.randn(4, 1, 8, 64), torch.randn(4, 1, 2, 64), torch.randn(4, 1, 2, 64)
        >>> lens = torch.tensor([5, 0, 31, 9], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True).shape
        torch.Size([4, 1, 8, 64])
        >>> torch.equal(k_cache[2, 31], k[2, 0])
        True
    """
    options = options_of(softmax_scale, causal, window_size, softcap, return_softmax_lse, attention_chunk)
    if page_table is not None and block_table is not None:
        raise bad_argument("page_table", describe(page_table), "None, since block_table is given")
    block_table = page_table if block_table is None else block_table
    if k is None and (rotary_cos is not None or rotary_sin is not None):
        raise bad_argument("rotary_cos", "a tensor without k", "None, or new keys and values")
    if (k is None) is not (v is None):
        raise bad_argument(*(("k", "None") if k is None else ("v", "None")), "a tensor, as the other is")
    if (rotary_cos is None) is not (rotary_sin is None):
        name = "rotary_cos" if rotary_cos is None else "rotary_sin"
        raise bad_argument(name, "None", "a tensor, as the other is")
    length, lens = None, None
    if isinstance(cache_seqlens, torch.Tensor):
        lens = cache_seqlens
    elif isinstance(cache_seqlens, (int, torch.SymInt)):
        length = bound("cache_seqlens", cache_seqlens)
    elif cache_seqlens is not None:
        raise bad_argument("cache_seqlens", describe(cache_seqlens), "an int, or int32 [batch]", TypeError)
    most = None if max_seqlen_q is None else bound("max_seqlen_q", max_seqlen_q)
    args = FlashArgs(
        *options, call_context(q), q, k, v, k_cache, v_cache, cu_seqlens_q, None, None, lens, block_table, rotary_cos,
        rotary_sin, rotary_seqlens, cu_seqlens_k_new, cache_batch_idx, cache_leftpad, scheduler_metadata, alibi_slopes,
        s_aux, q_descale, k_descale, v_descale, qv, out, most, None, length,
        flag("rotary_interleaved", rotary_interleaved),
    )  # fmt: skip
    return _run_cached(args)


def _build_cached(args: FlashArgs) -> Run:
    """Return a function that runs calls of `flash_attn_with_kvcache` of this kind."""
    batch = _check_cached(args)
    q, k, device = args.q, args.k, args.q.device
    batched = (batch, q.shape[1]) if args.cu_seqlens_q is None else None
    max_queries = q.shape[0 if batched is None else 1] if args.max_seqlen_q is None else args.max_seqlen_q
    is_checked = batch > 0 and checks_values(q)
    fewer_keys = k is None or args.cu_seqlens_k_new is not None or not known(max_queries <= k.shape[1])
    dense, (num_rows, capacity) = None, args.k_cache.shape[:2]
    rows = batch if args.cache_batch_idx is None else None
    if args.block_table is None:
        if rows is not None and num_rows < rows:
            raise bad_argument("k_cache", f"{num_rows} sequences", f"at least {batch}, or cache_batch_idx")
        dense = build_blocks(args.k_cache, args.v_cache, num_rows if rows is None else rows, in_place=True)
    else:
        check_tensor("block_table", args.block_table, "[batch, max_blocks]", INT32, device, (rows,))
        num_rows, capacity = args.block_table.shape[0], args.block_table.shape[1] * capacity
    full = capacity if args.cache_length is None else args.cache_length
    full_lens = full_i32(device, batch, full) if args.cache_seqlens is None else None
    even_starts = arange_i32(device, batch + 1, q.shape[1]) if args.cu_seqlens_q is None else None

    def keys_of(args: FlashArgs) -> PagedKV:
        k_cache, v_cache, tables, chosen = args.k_cache, args.v_cache, args.block_table, args.cache_batch_idx
        if dense is not None:
            k_cache, v_cache, tables = dense(k_cache, v_cache)
        tables = tables if chosen is None else tables.index_select(0, chosen)
        lens: Any = args.cache_seqlens if full_lens is None else full_lens
        starts = args.cu_seqlens_q if even_starts is None else even_starts
        return PagedKV(k_cache, v_cache, tables, lens, starts, max_queries, None, fewer_keys)

    def check_rows(args: FlashArgs) -> None:
        lens: Any = args.cache_seqlens if full_lens is None else full_lens
        leftpad = args.cache_leftpad
        if args.cache_batch_idx is not None:
            lowest_entry("cache_batch_idx", args.cache_batch_idx, num_rows, least=0)
        if leftpad is not None:
            lowest_entry("cache_leftpad", leftpad, capacity + 1, least=0)
            if (leftpad > lens.clamp(min=0)).any():
                raise bad_argument("cache_leftpad", leftpad.tolist(), f"at most cache_seqlens, {lens.tolist()}")

    def to_read(keys: PagedKV, args: FlashArgs) -> PagedKV:
        if args.cache_leftpad is not None:
            return without_leftpad(keys, args.cache_leftpad)
        return keys if args.scheduler_metadata is None else with_plan(keys, args)

    def check(query: torch.Tensor, keys: PagedKV, args: FlashArgs) -> None:
        keys, args = to_read(keys, args), args._replace(only_checks=True)
        build_attend(query, keys, args)(query, keys, args)

    if is_checked:
        check_rows(args)
    keys = keys_of(args)
    append = None if k is None else build_append(packed(q), keys, args, check)
    attend = build_attend(packed(q), keys, args)

    def run(args: FlashArgs) -> Any:
        if is_checked:
            check_rows(args)
        keys, query = keys_of(args), packed(args.q)
        if append is not None:
            query, lens = append(query, keys, args)
            keys = keys._replace(lens=lens)
        return shaped(attend(query, to_read(keys, args), args), batched, args.out)

    return run


_NAMES = {"key": "k", "value": "v", "key_cache": "k_cache", "value_cache": "v_cache"}
_NAMES |= {"seq_lens": "cache_seqlens", "cos_sin": "rotary_cos"}
_run_cached = flash_launch("flash_attn_with_kvcache", _build_cached, _NAMES)


def _check_cached(args: FlashArgs) -> int:
    """Check the arguments of `flash_attn_with_kvcache` and return the number of sequences."""
    q, is_packed = args.q, args.cu_seqlens_q is not None
    cache = "[batch, seqlen_cache, num_kv_heads, head_dim]"
    queries = "[total_q, num_heads, head_dim]" if is_packed else "[batch, seqlen_q, num_heads, head_dim]"
    tensors: dict[str, tuple[Any, str]] = {
        "q": (q, queries), "k_cache": (args.k_cache, cache), "v_cache": (args.v_cache, cache)
    }  # fmt: skip
    if args.k is not None:
        new = "[batch, seqlen_new, num_kv_heads, head_dim]"
        if args.cu_seqlens_k_new is not None:
            new = "[total, num_kv_heads, head_dim]"
        tensors |= {"k": (args.k, new), "v": (args.v, new)}
    check_tensors(tensors, args)
    batch = q.shape[0]
    if is_packed:
        check_starts("cu_seqlens_q", args.cu_seqlens_q, q.device)
        batch = args.cu_seqlens_q.shape[0] - 1
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad"):
        if getattr(args, name) is not None:
            check_tensor(name, getattr(args, name), "[batch]", INT32, q.device, (batch,))
    if args.k is not None and args.cu_seqlens_k_new is not None:
        check_tensor("cu_seqlens_k_new", args.cu_seqlens_k_new, "[batch + 1]", INT32, q.device, (batch + 1,))
    num_kv_heads, head_dim = args.k_cache.shape[-2:]
    if q.shape[-1] != head_dim or q.shape[-2] % num_kv_heads:
        needs = f"head_dim {head_dim} and a multiple of {num_kv_heads} heads, as k_cache has"
        raise bad_argument("q", f"shape {list(q.shape)}", needs)
    return batch


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine results over disjoint sets of keys, like FlashAttention 3's `flash_attn_combine`.

    Args:
        out_partial: `[num_splits, batch, seqlen, num_heads, head_dim]` or `[num_splits, total, num_heads, head_dim]`,
            any strides. Rows whose lse is -inf are ignored.
        lse_partial: The same shape without head_dim, float32, natural logarithms.
        out: A tensor with the result's shape and dtype, which is written to and returned.
        out_dtype: Dtype of the result. None: that of out_partial.

    Returns:
        out, without num_splits, and its lse `[batch, seqlen, num_heads]` or `[total, num_heads]` float32.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is wrong.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> from pc.flash_attn import flash_attn_combine
        >>> out, lse = flash_attn_combine(torch.randn(3, 2, 5, 8, 64), torch.randn(3, 2, 5, 8))
        >>> out.shape, lse.shape
        (torch.Size([2, 5, 8, 64]), torch.Size([2, 5, 8]))
    """
    check_partial(out_partial, lse_partial, out, out_dtype)
    lse = torch.logsumexp(lse_partial, 0)
    weights = torch.exp(lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1)
    result = torch.where(weights > 0, out_partial.float(), 0.0).mul_(weights).sum(0)
    if out is not None:
        return out.copy_(result), lse
    return result.to(out_partial.dtype if out_dtype is None else out_dtype), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Return the plan of a step for all layers, like FlashAttention 3's `get_scheduler_metadata`.

    See `pc.attention_plan`.

    A call uses the plan if its block table holds max_seqlen_k tokens in blocks of page_size. It must also have the
    options, lengths and queries given here. Any other call makes its own plan.

    Args:
        batch_size: Number of sequences.
        max_seqlen_q: Upper bound for a sequence's queries; without cu_seqlens_q, the number for each.
        max_seqlen_k: Number of tokens in a row of the block table.
        num_heads_q: No effect, like headdim, headdim_v, qkv_dtype, has_softcap, num_splits, pack_gqa and sm_margin.
        num_heads_kv: Number of KV heads, which decides how finely the work is split.
        headdim: No effect.
        cache_seqlens: `[batch]` int32, number of each sequence's keys before the call adds new ones.
        qkv_dtype: No effect.
        headdim_v: No effect.
        cu_seqlens_q: `[batch + 1]` int32, start of each sequence's queries.
        cu_seqlens_k_new: `[batch + 1]` int32, start of each sequence's new keys.
        cache_leftpad: A call with this argument does not use a plan.
        page_size: Number of tokens in a block. None: that of a dense cache.
        max_seqlen_k_new: Number of new keys of each sequence, without cu_seqlens_k_new.
        causal: As for the call.
        window_size: As for the call.
        attention_chunk: A call with this argument does not use a plan.
        has_softcap: No effect.
        num_splits: No effect.
        pack_gqa: No effect.
        sm_margin: No effect.

    Returns:
        One int32 tensor, for `scheduler_metadata`.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, device or number is wrong.

    Examples:
        >>> from pc.flash_attn import get_scheduler_metadata
        >>> lens = torch.tensor([20, 7], dtype=torch.int32)
        >>> get_scheduler_metadata(2, 1, 64, 8, 2, 64, lens, page_size=16, causal=True).dtype
        torch.int32
    """
    size = 16 if page_size is None else check_integer("page_size", page_size, 1, 31)
    check_integer("num_heads_kv", num_heads_kv, 1)
    numbers = {"batch_size": batch_size, "max_seqlen_q": max_seqlen_q}
    numbers |= {"max_seqlen_k": max_seqlen_k, "max_seqlen_k_new": max_seqlen_k_new}
    for name, number in numbers.items():
        if bound(name, number) is None:
            raise bad_argument(name, None, "an int", TypeError)
    check_tensor("cache_seqlens", cache_seqlens, "[batch]", INT32, sizes=(batch_size,))
    for name, begins in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k_new", cu_seqlens_k_new)):
        if begins is not None:
            check_tensor(name, begins, "[batch + 1]", INT32, cache_seqlens.device, (batch_size + 1,))
    tables = strided_block_table(cache_seqlens.device, batch_size, -(-max_seqlen_k // size), 0, 1)
    lens = cache_seqlens + (max_seqlen_k_new if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    starts = arange_i32(lens.device, batch_size + 1, max_seqlen_q) if cu_seqlens_q is None else cu_seqlens_q
    lens = lens.clamp(0, tables.shape[1] * size)
    if reads_values(lens):  # operators that read values refuse fewer keys than queries; such a call makes its own plan
        lens = lens.masked_fill(lens < starts.diff(), 0)
    left, right = pair(window_size)
    left = -1 if left >= PlanShape.of(tables, size).num_keys else left
    right = 0 if flag("causal", causal) or max_seqlen_q <= 1 else right
    return attention_plan(tables, lens, starts, size, right == 0, left + 1, num_kv_heads=num_heads_kv)
