"""FlashAttention's interface on this package's operators: its three functions, forward only.

Names, shapes and meanings are those of FlashAttention 2.8 (https://github.com/Dao-AILab/flash-attention) in its order,
and by name those that FlashAttention 3 and its forks for serving add. Queries go to the operators packed, keys and
values as blocks of a cache: dense ones as views, by block tables that their sizes tell (`_attention/dense.py`).

What a call's metadata decide is chosen once for calls of a kind, as the operators do: `_choose_...` below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ._attention.dense import as_blocks, choose_packed_tables, counted, numbered, repeated
from ._checks import bad_argument, check_integer, describe, reads_values
from ._dispatch import is_watched
from ._flash import (
    FlashOptions,
    Given,
    Keys,
    check_numbers,
    check_out,
    check_tensors,
    check_values,
    contiguous,
    pair,
    refuse,
    run_chosen,
)  # fmt: skip
from ._flash_append import Append, Rotary
from ._flash_attention import UsedQueries, choose_attention, shaped

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Run = Callable[..., Any]

_DENSE_NAMES = {"seq_lens": "k", "query_start_loc": "q"}
_CACHED_NAMES = {
    "key": "k",
    "value": "v",
    "key_cache": "k_cache",
    "value_cache": "v_cache",
    "seq_lens": "cache_seqlens",
    "cos_sin": "rotary_cos",
}


def _with_probabilities(found: Any, return_attn_probs: bool) -> Any:
    """What FlashAttention 2 returns for tests of its dropout has a third thing."""
    return (*found, found[0].new_empty(0)) if return_attn_probs else found


def _bound(name: str, value: Any) -> int | None:
    """An upper bound of lengths; a tensor is read."""
    if value is None:
        return None
    if isinstance(value, torch.SymInt):
        return cast(int, value)
    return check_integer(name, int(value) if isinstance(value, torch.Tensor) else value, 0, 31)


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
    """Attention of a batch of sequences of one length, as FlashAttention's `flash_attn_func`; forward only.

    The query at index i stands at position p = i + seqlen_k - seqlen_q (the mask begins at the bottom right) and
    attends to keys p - window_size[0] to p + window_size[1], -1 being no bound; causal is window_size[1] = 0. A row
    with nothing to attend to gives 0 and lse -inf.

    k and v are read where they are, whatever their strides, if their last dimension is contiguous; they are copied
    where one has its heads before its tokens and the other behind, in a batch of several sequences.

    Args:
        q: `[batch, seqlen_q, num_heads, head_dim]`, float16, bfloat16, float32, or float8_e4m3fn (out is bfloat16).
        k: `[batch, seqlen_k, num_kv_heads, head_dim]`, the same dtype; or float8_e4m3fn or int8.
        v: Like k; its head_dim may be another.
        dropout_p: 0; refused otherwise.
        softmax_scale: Factor on q.k; None: head_dim ** -0.5.
        causal: Whether a query sees no key behind its own position.
        window_size: How many keys before and behind its position a query sees.
        softcap: A score becomes softcap * tanh(score / softcap) when positive.
        alibi_slopes: `[num_heads]`, or `[batch, num_heads]` of each sequence, which are attended to one by one then;
            adds -slope * abs(t - p) to the score of key t. Queries that see keys behind them take two passes.
        deterministic: Heeded as it is: the same bits for the same call.
        return_attn_probs: Whether to return (out, lse, an empty tensor), as FlashAttention 2 without dropout.
        s_aux: `[num_heads]`, a learned logit per head that joins the softmax's denominator (attention sinks).
        q_descale: `[batch, num_kv_heads]`, what a quantized q is multiplied by; ignored for others.
        k_descale: The same for k.
        v_descale: The same for v.
        qv: None; refused otherwise.
        attention_chunk: 0; refused otherwise.
        num_splits: Without effect, as are pack_gqa and sm_margin: how the work is split is chosen here.
        pack_gqa: Without effect.
        sm_margin: Without effect.
        return_softmax_lse: Whether to return (out, lse).
        out: `[batch, seqlen_q, num_heads, head_dim of v]`, written to and returned.

    Returns:
        out `[batch, seqlen_q, num_heads, head_dim of v]`; with the lse `[batch, num_heads, seqlen_q]` float32, natural
        logarithms with sinks included, where asked for.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device, or an option that is not served.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> from pc.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(2, 3, 8, 64), torch.randn(2, 10, 2, 64), torch.randn(2, 10, 2, 64)
        >>> flash_attn_func(q, k, v, causal=True, window_size=(4, 0)).shape
        torch.Size([2, 3, 8, 64])
    """
    if dropout_p or attention_chunk or qv is not None:
        refuse(dropout_p=dropout_p, qv=qv, attention_chunk=attention_chunk)
    options = FlashOptions(softmax_scale, causal, pair(window_size), softcap, return_attn_probs or return_softmax_lse)
    given = (alibi_slopes, s_aux, q_descale, k_descale, v_descale, out)
    found = run_chosen(_choose_dense, _DENSE_NAMES, options, q, k, v, *given)
    return _with_probabilities(found, return_attn_probs)


def _choose_dense(options: FlashOptions, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Run:
    given, layout = Given(*others), "[batch, seqlen, heads, head_dim]"
    check_tensors({"q": (q, layout), "k": (k, layout), "v": (v, layout)}, given)
    batch, seqlen_q, seqlen_k, device = *q.shape[:2], k.shape[1], q.device
    for name, x in (("k", k), ("v", v)):
        if x.shape[:2] != (batch, seqlen_k) or x.device != device:
            raise bad_argument(name, describe(x), f"[{batch}, {seqlen_k}, num_kv_heads, head_dim] on {device}")
    check_out(given.out, q, v.shape[3])
    blocks = as_blocks(contiguous(k), contiguous(v))
    tables = numbered(device, batch, seqlen_k // max(1, blocks.size), blocks.per_sequence, blocks.per_block)
    lens, starts = repeated(device, batch, seqlen_k), counted(device, batch + 1, seqlen_q)
    are_views = not blocks.copied and k.stride(3) == v.stride(3) == 1
    kinds = [(x.shape, x.stride()) for x in blocks[:2]]

    def keys_of(k: torch.Tensor, v: torch.Tensor, in_place: bool = False) -> Keys:
        if are_views and not in_place:
            k, v = k.as_strided(*kinds[0]), v.as_strided(*kinds[1])
        elif not are_views:
            k, v = as_blocks(contiguous(k), contiguous(v))[:2]
        return Keys(k, v, tables, lens, starts, seqlen_q, seqlen_k, seqlen_q > seqlen_k)

    def packed(q: torch.Tensor) -> torch.Tensor:
        return contiguous(q).reshape(-1, *q.shape[2:])

    is_packed = q.is_contiguous()
    attention = choose_attention(packed(q), keys_of(k, v), options, given)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
        given = Given(*others)
        in_place = attention.takes_addresses()
        query = q if in_place and is_packed else packed(q)
        return shaped(*attention(query, keys_of(k, v, in_place), given), (batch, seqlen_q), given.out)

    return run


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
    """Attention of packed sequences, as FlashAttention's `flash_attn_varlen_func` and vLLM's; forward only.

    Masks, refusals and the arguments that are not explained here are those of `flash_attn_func`.

    Args:
        q: `[total_q, num_heads, head_dim]`, sequences one behind the other; rows past the last one give 0.
        k: `[total_k, num_kv_heads, head_dim]`, read where it is; with block_table
            `[num_blocks, block_size, num_kv_heads, head_dim]`, a paged cache of any block size and strides.
        v: Like k.
        cu_seqlens_q: `[batch + 1]` int32, where each sequence's queries begin.
        cu_seqlens_k: `[batch + 1]` int32, the same for keys; with block_table only their differences count. None if
            seqused_k and block_table are given.
        max_seqlen_q: Upper bound of a sequence's queries; None: all of them. A tensor is read, which synchronizes.
        max_seqlen_k: The same for keys.
        block_table: `[batch, max_blocks]` int32, block numbers of each sequence.
        seqused_q: `[batch]` int32, how many of each sequence's queries count, from its first on; others give 0 and lse
            -inf.
        seqused_k: `[batch]` int32, how many keys of each sequence count, instead of cu_seqlens_k's differences.
        scheduler_metadata: Without effect, as is fa_version.
        out: `[total_q, num_heads, head_dim of v]`, written to and returned.

    Returns:
        out `[total_q, num_heads, head_dim of v]`; with the lse `[num_heads, total_q]` float32 where asked for.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device, or an option that is not served.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> from pc.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(5, 8, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)
        >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)  # sequences of 2 and of 3 tokens
        >>> flash_attn_varlen_func(q, k, v, starts, starts, 3, 3, causal=True).shape
        torch.Size([5, 8, 64])
    """
    if dropout_p or attention_chunk or qv is not None:
        refuse(dropout_p=dropout_p, qv=qv, attention_chunk=attention_chunk)
    if seqused_q is not None:
        check_tensors({"q": (q, "[total_q, num_heads, head_dim]")}, Given(*[None] * 6))
        check_out(out, q, v.shape[-1])
        check_numbers("cu_seqlens_q", cu_seqlens_q, None, q.device)
        used = UsedQueries(q, cu_seqlens_q, seqused_q)
        found = flash_attn_varlen_func(
            used.pack(q), k, v, used.starts, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, block_table=block_table, seqused_k=seqused_k, s_aux=s_aux,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, return_softmax_lse=True,
        )  # fmt: skip
        result, lse = used.unpack(*found)
        result = result if out is None else out.copy_(result)
        found = (result, lse) if return_attn_probs or return_softmax_lse else result
        return _with_probabilities(found, return_attn_probs)
    options = FlashOptions(softmax_scale, causal, pair(window_size), softcap, return_attn_probs or return_softmax_lse)
    most = (_bound("max_seqlen_q", max_seqlen_q), _bound("max_seqlen_k", max_seqlen_k))
    same = cu_seqlens_k is cu_seqlens_q
    tensors = (q, k, v, cu_seqlens_q, None if same else cu_seqlens_k, seqused_k, block_table)
    given = (alibi_slopes, s_aux, q_descale, k_descale, v_descale, out)
    names = {} if seqused_k is None else {"seq_lens": "seqused_k"}
    found = run_chosen(_choose_packed, names, (options, same, *most), *tensors, *given)
    return _with_probabilities(found, return_attn_probs)


def _choose_packed(
    call: tuple[FlashOptions, bool, int | None, int | None],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    *others: Any,
) -> Run:
    (options, same, most_queries, most_keys), given = call, Given(*others)
    paged = block_table is not None
    layout = "[num_blocks, block_size, num_kv_heads, head_dim]" if paged else "[total_k, num_kv_heads, head_dim]"
    check_tensors({"q": (q, "[total_q, num_heads, head_dim]"), "k": (k, layout), "v": (v, layout)}, given)
    check_out(given.out, q, v.shape[-1])
    if cu_seqlens_k is None and not same and (seqused_k is None or not paged):
        raise bad_argument("cu_seqlens_k", "None", "[batch + 1] int32; or seqused_k and block_table")
    check_numbers("cu_seqlens_q", cu_seqlens_q, None, q.device)
    if cu_seqlens_k is not None:
        check_numbers("cu_seqlens_k", cu_seqlens_k, None, q.device)
    if seqused_k is not None:
        check_numbers("seqused_k", seqused_k, cu_seqlens_q.shape[0] - 1, q.device)
    max_queries = q.shape[0] if most_queries is None else most_queries
    max_keys = k.shape[0] if most_keys is None and not paged else most_keys
    begins = cu_seqlens_q if same else cu_seqlens_k
    tables_of = None
    if begins is not None and (not paged or seqused_k is None):
        tables_of = choose_packed_tables(begins, 0 if paged else max_keys or 0)

    def keys_of(
        in_place: bool, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *where: torch.Tensor | None
    ) -> Keys:
        begins, lens, tables = where
        if tables_of is not None:
            own, differences = tables_of(starts if begins is None else begins)
            tables, lens = own if tables is None else tables, differences if lens is None else lens
        if not paged:
            k, v = contiguous(k), contiguous(v)
            if not in_place:
                k, v = k.unsqueeze(1), v.unsqueeze(1)
        assert lens is not None
        assert tables is not None
        return Keys(k, v, tables, lens, starts, max_queries, max_keys, not same or seqused_k is not None)

    keys = keys_of(False, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    attention = choose_attention(q, keys, options, given)

    def run(q: torch.Tensor, *rest: Any) -> Any:
        given = Given(*rest[6:])
        return shaped(
            *attention(contiguous(q), keys_of(attention.takes_addresses(), *rest[:6]), given), None, given.out
        )

    return run


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
    """Attention over a cache that new keys and values are written to first, as `flash_attn_with_kvcache`.

    New keys go to positions cache_seqlens, cache_seqlens + 1, ... of their sequences, rotated there if rotary_cos is
    given; queries are rotated as if they were there too where causal or in a window, all at cache_seqlens otherwise. No
    value on the device is read, so that the call can be captured in a CUDA graph. Masks, refusals and the arguments
    that are not explained here are those of `flash_attn_func`.

    Args:
        q: `[batch, seqlen_q, num_heads, head_dim]`; with cu_seqlens_q `[total_q, num_heads, head_dim]`.
        k_cache: `[batch of the cache, seqlen_cache, num_kv_heads, head_dim]`, or with block_table
            `[num_blocks, block_size, num_kv_heads, head_dim]`; any strides with a contiguous last dimension. The dtype
            of q, or float8_e4m3fn or int8 with k_descale.
        v_cache: Like k_cache; its head_dim may be another.
        k: `[batch, seqlen_new, num_kv_heads, head_dim]`, new keys to be written.
        v: Like k.
        rotary_cos: `[max_positions, rotary_dim / 2]`, cosines; only with k.
        rotary_sin: The same of sines.
        cache_seqlens: `[batch]` int32 or one int, keys in the cache before this call; None: the cache is full.
        cache_batch_idx: `[batch]` int32, which sequence of a dense cache is each of the batch; None: in order.
        cache_leftpad: `[batch]` int32, where a sequence begins in a dense cache; None: at 0.
        block_table: `[batch, max_blocks]` int32, block numbers of each sequence; -1: nothing there.
        rotary_interleaved: Whether pairs of features are (2i, 2i + 1); otherwise (i, i + rotary_dim / 2).
        page_table: Another name of block_table.
        cu_seqlens_q: `[batch + 1]` int32, where each sequence's queries begin in a packed q; not with k.
        max_seqlen_q: Upper bound of a packed sequence's queries; None: all of them.
        cu_seqlens_k_new: Without effect where there is no k; refused with it.
        rotary_seqlens: `[batch]` int32, positions of the first new tokens for the rotation; None: cache_seqlens.
        k_descale: `[batch, num_kv_heads]`, what a quantized k_cache is multiplied by; new keys are stored divided by
            it, and with them it may not differ between sequences.
        v_descale: The same for v_cache.
        scheduler_metadata: Without effect.
        out: Like the result, written to and returned.

    Returns:
        out like q with the head_dim of v_cache; with the lse `[batch, num_heads, seqlen_q]` float32, packed
        `[num_heads, total_q]`, where asked for.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device, or an option that is not served.
        RuntimeError: A tensor that requires grad while grad mode is on.

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
    if attention_chunk or qv is not None:
        refuse(qv=qv, attention_chunk=attention_chunk)
    options = FlashOptions(softmax_scale, causal, pair(window_size), softcap, return_softmax_lse)
    block_table = page_table if block_table is None else block_table
    if k is not None or v is not None:
        if cu_seqlens_q is not None or cu_seqlens_k_new is not None:
            refuse(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
    elif rotary_cos is not None or rotary_sin is not None:
        raise bad_argument("rotary_cos", "a tensor without k", "None, or new keys and values")
    for name, one, other in (("k", k, v), ("v", v, k), ("rotary_cos", rotary_cos, rotary_sin),
                             ("rotary_sin", rotary_sin, rotary_cos)):  # fmt: skip
        if one is None and other is not None:
            raise bad_argument(name, "None", "a tensor, as the one beside it is")
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        refuse(cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    length, lens = None, None
    if isinstance(cache_seqlens, torch.Tensor):
        lens = cache_seqlens
    elif isinstance(cache_seqlens, (int, torch.SymInt)):
        length = _bound("cache_seqlens", cache_seqlens)
    elif cache_seqlens is not None:
        raise bad_argument("cache_seqlens", describe(cache_seqlens), "an int, or int32 [batch]", TypeError)
    most = _bound("max_seqlen_q", max_seqlen_q)
    where = (lens, cache_batch_idx, cache_leftpad, block_table, cu_seqlens_q)
    call = (options, length, most, rotary_interleaved)
    return run_chosen(
        _choose_cached, _CACHED_NAMES, call, q, k_cache, v_cache, k, v, *where, rotary_cos, rotary_sin, rotary_seqlens,
        alibi_slopes, s_aux, q_descale, k_descale, v_descale, out,
    )  # fmt: skip


def _choose_cached(
    call: tuple[FlashOptions, int | None, int | None, bool],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *rest: Any,
) -> Run:
    (options, length, most, interleaved), given = call, Given(*rest[8:])
    cu_seqlens_q = rest[4]
    cache = "[batch, seqlen_cache, num_kv_heads, head_dim]"
    queries = "[batch, seqlen_q, num_heads, head_dim]" if cu_seqlens_q is None else "[total_q, num_heads, head_dim]"
    tensors: dict[str, tuple[Any, str]] = {
        "q": (q, queries), "k_cache": (k_cache, cache), "v_cache": (v_cache, cache)
    }  # fmt: skip
    if k is not None or v is not None:
        new = "[batch, seqlen_new, num_kv_heads, head_dim]"
        tensors |= {"k": (k, new), "v": (v, new)}
    check_tensors(tensors, given)
    check_out(given.out, q, v_cache.shape[3])
    device, batch = q.device, q.shape[0]
    if cu_seqlens_q is not None:
        check_numbers("cu_seqlens_q", cu_seqlens_q, None, device)
        batch = cu_seqlens_q.shape[0] - 1
    for name, numbers in zip(("cache_seqlens", "cache_batch_idx", "cache_leftpad"), rest[:3], strict=True):
        if numbers is not None:
            check_numbers(name, numbers, batch, device)
    batched = (q.shape[0], q.shape[1]) if cu_seqlens_q is None else None
    max_queries = q.shape[0] if batched is None else q.shape[1]
    max_queries = max_queries if most is None else most
    dense = _dense_cache(batch, k_cache, v_cache, rest[1], rest[2]) if rest[3] is None else None
    columns, size = (rest[3].shape[1], k_cache.shape[1]) if dense is None else (dense[0].shape[1], dense[2][0][0][1])
    full = None
    if rest[0] is None:
        full = repeated(device, batch, columns * size if length is None else length)
    packed_starts = None if batched is None else counted(device, batch + 1, q.shape[1])

    def keys_of(in_place: bool, k_cache: torch.Tensor, v_cache: torch.Tensor, *where: Any) -> Keys:
        lens, chosen, _, tables, starts = where
        if dense is not None:
            tables, _, kinds = dense
            tables = tables if chosen is None else tables.index_select(0, chosen)
            if not in_place:
                k_cache, v_cache = k_cache.as_strided(*kinds[0]), v_cache.as_strided(*kinds[1])
        lens, starts = (lens if full is None else full), (starts if packed_starts is None else packed_starts)
        return Keys(k_cache, v_cache, tables, lens, starts, max_queries, None, k is None or k.shape[1] < max_queries)

    def packed(q: torch.Tensor) -> torch.Tensor:
        return contiguous(q).reshape(-1, *q.shape[-2:])

    def rotary_of(keys: Keys, cos: torch.Tensor | None, sin: Any, first: torch.Tensor | None) -> Rotary | None:
        return None if cos is None else Rotary(cos, sin, keys.lens if first is None else first, interleaved)

    checks_values, rows = reads_values(q) and not is_watched() and batch > 0, k_cache.shape[0]

    def check(lens: torch.Tensor, chosen: torch.Tensor | None, leftpad: torch.Tensor | None) -> None:
        if chosen is not None:
            check_values("cache_batch_idx", chosen, 0, rows - 1)
        if leftpad is not None:
            check_values("cache_leftpad", leftpad, 0, columns * size)
            if (leftpad > lens.clamp(min=0)).any():
                raise bad_argument("cache_leftpad", leftpad.tolist(), f"at most cache_seqlens, {lens.tolist()}")

    if checks_values:
        check(rest[0] if full is None else full, *rest[1:3])
    keys, append, is_packed = keys_of(False, k_cache, v_cache, *rest[:5]), None, q.is_contiguous()
    if k is not None:
        assert v is not None
        append = Append(packed(q), k, v, keys, options, given, rotary_of(keys, *rest[5:8]))
    attention = choose_attention(packed(q), keys, options, given)

    def run(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Any, v: Any, *rest: Any) -> Any:
        if checks_values:
            check(rest[0] if full is None else full, *rest[1:3])
        in_place = attention.takes_addresses() and (append is None or append.takes_addresses())
        keys, leftpad, given = keys_of(in_place, k_cache, v_cache, *rest[:5]), rest[2], Given(*rest[8:])
        query = q if in_place and is_packed else packed(q)
        if append is not None:
            query, keys = append(query, k, v, keys, given, rotary_of(keys, *rest[5:8]))
        if leftpad is not None:
            assert dense is not None
            leftpad = leftpad.clamp(min=0)  # below it lies another sequence
            keys = keys._replace(tables=keys.tables + leftpad.unsqueeze(1) * dense[1], lens=keys.lens - leftpad)
        return shaped(*attention(query, keys, given), batched, given.out)

    return run


def _dense_cache(
    batch: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
) -> tuple[torch.Tensor, int, list[tuple[torch.Size, tuple[int, ...]]]]:
    """Block tables of a dense cache, how far numbers of blocks lie apart, and its views' sizes and strides."""
    rows, length = k_cache.shape[:2]
    if cache_batch_idx is None and rows < batch:
        raise bad_argument("k_cache", f"{rows} sequences", f"at least {batch}, or cache_batch_idx")
    blocks = as_blocks(k_cache, v_cache, cache_leftpad is not None, in_place=True)
    if cache_leftpad is not None and blocks.size > 1:
        raise bad_argument("v_cache", f"strides {list(v_cache.stride())}", "those of k_cache, with cache_leftpad")
    rows = batch if cache_batch_idx is None else rows
    tables = numbered(k_cache.device, rows, length // max(1, blocks.size), blocks.per_sequence, blocks.per_block)
    return tables, blocks.per_block, [(cache.shape, cache.stride()) for cache in blocks[:2]]
