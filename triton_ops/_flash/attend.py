"""Calls of attention operators for FlashAttention's functions, with masks, biases and scales in the operators' form.

A window (left, right) around position p holds the keys p - left to p + right. A side of -1 is unbounded, and so is a
side wider than the sequence. Operators have one window, which ends at the query. If the two sides differ, the positions
of queries are increased by `right`. Operators then attend to t <= p + right and t > p + right - window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._attention.dense import arange_i32
from .._attention.layout import PlanShape
from .._core.checks import bad_argument, describe, reads_values
from .._core.quantize import QUANTIZED_DTYPES
from ..latent_attention import latent_attention, latent_attention_with_lse
from ..merge_attention import merge_attention
from ..paged_attention import paged_attention, paged_attention_with_lse
from ..sliding_window_attention import sliding_window_attention, sliding_window_attention_with_lse
from ..sparse_gap_attention import sparse_gap_attention, sparse_gap_attention_with_lse
from .arguments import FlashArgs, known, packed
from .paged_kv import PagedKV, in_chunks, mirrored, rows, sequence_of_token, with_holes

Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def _sides(keys: PagedKV, args: FlashArgs) -> tuple[int, int]:
    """Return the window's sides. A side without keys is 0, and a side that excludes no key is -1."""
    left, right = args.window_size
    # A plan was made for any keys that fit its tiles, so a window may end only where the plan's does.
    is_planned = args.scheduler_metadata is not None
    if known(left >= (PlanShape.of(keys.tables, keys.key_cache.shape[1]).num_keys if is_planned else keys.longest)):
        left = -1
    # No keys follow a single query. Without sequences, all queries are padding.
    if args.causal or known(keys.max_queries <= 1) or known(keys.lens.shape[0] == 0):
        return left, 0
    return left, -1 if known(right >= keys.max_queries - 1) else right


def _scale_of(args: FlashArgs, head_dim: int) -> float:
    """Return the factor on q.k."""
    return float(head_dim**-0.5 if args.softmax_scale is None else args.softmax_scale)


def _needs_holes(keys: PagedKV, query: torch.Tensor) -> bool:
    """Return whether keys need `with_holes`, since operators refuse a sequence with more queries than keys."""
    return keys.fewer_keys and reads_values(query) and not known(keys.max_queries <= 1)


def _is_quantized(query: torch.Tensor, keys: PagedKV) -> bool:
    return query.dtype == torch.float8_e4m3fn or keys.key_cache.dtype in QUANTIZED_DTYPES


def _build_window(keys: PagedKV, args: FlashArgs, head_dim: int, left: int, right: int) -> Callable[..., Any]:
    """Return a function of (query, keys, args, scales) that attends to a window around each query."""
    before: tuple[float, ...] = (_scale_of(args, head_dim),)
    operators: tuple[Callable[..., Any], Callable[..., Any]] = (paged_attention, paged_attention_with_lse)
    ahead = 0  # number by which positions of queries are increased
    if right and left != right:
        ahead = right if right > 0 else keys.max_queries
        before = (*before, left + ahead + 1 if left >= 0 else 0, 0)
        operators = (sparse_gap_attention, sparse_gap_attention_with_lse)
    elif left >= 0:
        before = (*before, left + 1, 0)
        operators = (sliding_window_attention, sliding_window_attention_with_lse)
    before = (*before, ahead > 0 or right == 0, args.softcap)
    # torch.compile of torch 2.11 takes no bool as an index.
    operator: Any = operators[1 if args.with_lse else 0]
    operator, after = operator.check if args.only_checks else operator, (keys.max_queries, keys.max_keys)

    def attend(query: torch.Tensor, keys: PagedKV, args: FlashArgs, scales: Scales = (None, None)) -> Any:
        batch: tuple[torch.Tensor, ...] = (keys.tables, keys.lens, keys.starts)
        plan = keys.plan
        if ahead:
            token, sequence = sequence_of_token(keys.starts, query.shape[0])
            batch = (*batch, token + (keys.lens - keys.starts[1:] + ahead).index_select(0, sequence))
            plan = None
        # The dispatcher takes positional arguments fastest.
        return operator(
            query, keys.key_cache, keys.value_cache, *batch, *before, args.alibi_slopes, args.s_aux, *scales, *after,
            plan, False,
        )  # fmt: skip

    return attend


def build_attend(query: torch.Tensor, keys: PagedKV, args: FlashArgs) -> Callable[[torch.Tensor, PagedKV, Any], Any]:
    """Return a function of (query, keys, args) that attends, for calls of this kind.

    If one operator serves such calls, the function calls that operator without choosing again.
    """
    slopes, (left, right) = args.alibi_slopes, _sides(keys, args)
    has_slopes = slopes is not None and (right != 0 or slopes.dim() != 1)
    is_reordered = bool(args.attention_chunk) or _needs_holes(keys, query)
    if is_reordered or has_slopes or args.qv is not None or _is_quantized(query, keys):
        return _attend
    return _build_window(keys, args, query.shape[-1], left, right)


def _attend(query: torch.Tensor, keys: PagedKV, args: FlashArgs) -> Any:
    """Attend with packed queries `[num_tokens, num_heads, head_dim]`; return out or (out, lse)."""
    slopes, batch, after = args.alibi_slopes, keys.lens.shape[0], None
    scales: Scales = (None, None)
    if args.qv is not None:
        return _attend_latent(query, packed(args.qv), keys, args)
    if _is_quantized(query, keys) or args.query_scale is not None:
        query, scales, after = _dequantized(query, keys, args)
    attend = _attend_heads
    if slopes is not None and slopes.dim() == 2:
        num_heads = query.shape[1]
        if slopes.shape != (batch, num_heads):
            needs = f"[{num_heads}], or [{batch}, {num_heads}], slopes of each sequence"
            raise bad_argument("alibi_slopes", describe(slopes), needs)
        if batch > 1 and slopes.stride(0):
            attend = _attend_each
        else:
            args = args._replace(alibi_slopes=slopes[0] if batch else slopes.new_zeros(num_heads))
    found = attend(query, keys, args, scales)
    if after is None:
        return found
    out, *lse = found if args.with_lse else (found,)
    out = (out * after).to(out.dtype)
    return (out, *lse) if args.with_lse else out


def _attend_each(query: torch.Tensor, keys: PagedKV, args: FlashArgs, scales: Scales) -> Any:
    """Attend with ALiBi slopes of each sequence: one call for each, in which the others have no keys."""
    assert args.alibi_slopes is not None
    token, sequence = sequence_of_token(keys.starts, query.shape[0])
    index, found = arange_i32(query.device, keys.lens.shape[0], 1).unsqueeze(1), []
    for i, slopes in enumerate(args.alibi_slopes.unbind()):
        alone = keys._replace(tables=torch.where(index == i, keys.tables, -1), plan=None)
        found.append(_attend_heads(query, alone, args._replace(alibi_slopes=slopes), scales))
    if not args.with_lse:
        return torch.stack(found)[sequence, token]
    return tuple(torch.stack(parts)[sequence, token] for parts in zip(*found, strict=True))


def _attend_heads(query: torch.Tensor, keys: PagedKV, args: FlashArgs, scales: Scales) -> Any:
    """Attend with slopes of heads, or without; return out or (out, lse).

    For queries that see keys after p, ALiBi is -slope * |t - p|, which takes two calls. The first reads the keys up to
    p. The second reads the keys after p in reverse order, where each key is one position nearer to its query than in
    the sequence. Its scores are therefore too large by the slope, which is subtracted from its lse.
    """
    if args.attention_chunk:
        keys = in_chunks(keys, args.attention_chunk, args.causal)
    slopes, (left, right) = args.alibi_slopes, _sides(keys, args)
    if slopes is None or not right:
        return _attend_window(query, keys, args, left, right, scales)
    both = args._replace(with_lse=True)
    past, past_lse = _attend_window(query, keys, both, left, 0, scales)
    behind, places = mirrored(keys, query.shape[0])
    without_sinks = both._replace(s_aux=None)
    future, lse = _attend_window(rows(query, places), behind, without_sinks, max(-1, right - 1), 0, scales)
    lse = lse.index_select(0, places) - slopes.float()
    found = merge_attention(past, past_lse, future.index_select(0, places), lse)
    return found if args.with_lse else found[0]


def _attend_window(query: torch.Tensor, keys: PagedKV, args: FlashArgs, left: int, right: int, scales: Scales) -> Any:
    """Attend to the keys from `left` before to `right` after each query, with one operator."""
    if _needs_holes(keys, query):
        keys = with_holes(keys)
    return _build_window(keys, args, query.shape[-1], left, right)(query, keys, args, scales)


def _attend_latent(query: torch.Tensor, qv: torch.Tensor, keys: PagedKV, args: FlashArgs) -> Any:
    """Attend with queries of two parts, scale * (q.k + qv.v), over rows that hold v and k and are read once."""
    extra = (args.alibi_slopes, args.s_aux)
    (left, right), value_dim, width = _sides(keys, args), qv.shape[-1], query.shape[-1] + qv.shape[-1]
    fits = keys.key_cache.shape[2] == 1 and value_dim % 16 == 0 and width % 16 == 0 and width <= 1024
    if not fits or left >= 0 or right > 0 or any(x is not None for x in extra) or _is_quantized(query, keys):
        needs = "one KV head, head_dims that are multiples of 16 and 1024 together at most, 16 bits or 32, "
        raise bad_argument("qv", describe(qv), f"{needs}no window, alibi_slopes or s_aux: others are not served")
    if qv.dtype != query.dtype:
        raise bad_argument("qv", describe(qv), f"dtype {query.dtype} of q", TypeError)
    key, value = keys.key_cache, keys.value_cache
    begin = value.storage_offset() + value_dim
    if (
        key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        and key.stride() == value.stride()
        and key.storage_offset() == begin
    ):
        cache = value.as_strided((*value.shape[:3], width), value.stride())
    else:
        cache = torch.cat((value, key), 3)
    keys = keys._replace(key_cache=cache, value_cache=cache[..., :value_dim])
    if args.attention_chunk:
        keys = in_chunks(keys, args.attention_chunk, args.causal)
    if _needs_holes(keys, query):
        keys = with_holes(keys)
    operator: Any = latent_attention_with_lse if args.with_lse else latent_attention
    return (operator.check if args.only_checks else operator)(
        torch.cat((qv, query), 2), keys.key_cache, keys.tables, keys.lens, keys.starts, _scale_of(args, width),
        value_dim, right == 0, args.softcap, None, keys.max_queries, keys.max_keys, keys.plan,
    )  # fmt: skip


def with_plan(keys: PagedKV, args: FlashArgs) -> PagedKV:
    """Return the keys with the plan that the caller passed, if its size fits their tables; else without a plan."""
    plan = args.scheduler_metadata
    if plan is None or args.attention_chunk or plan.shape != (PlanShape.of(keys.tables, keys.key_cache.shape[1]).size,):
        return keys
    return keys._replace(plan=plan)


def scale_of_heads(name: str, descale: torch.Tensor, batch: int) -> torch.Tensor | None:
    """Return a descale `[batch, num_kv_heads]` as the scale of an operator; None if sequences may have other scales."""
    if descale.dim() == 0 or descale.numel() == 1:
        return descale.reshape(1)
    if descale.dim() == 1:
        return descale
    if descale.dim() != 2 or descale.shape[0] != batch:
        raise bad_argument(name, describe(descale), f"[{batch}, num_kv_heads], or one element")
    if batch > 1 and descale.stride(0):
        return None
    return descale[0] if descale.stride(1) or descale.shape[1] == 1 else descale[0, :1]


def _of_query_heads(descale: torch.Tensor, num_heads: int, sequence: torch.Tensor | None) -> torch.Tensor:
    """Return a descale as a factor `[num_tokens or 1, num_heads, 1]` of queries or results."""
    if descale.dim() == 2 and descale.numel() > 1:
        descale = descale[:1] if sequence is None else descale.index_select(0, sequence)
    descale = descale.reshape(-1, descale.shape[-1] if descale.dim() else 1).float()
    return descale.repeat_interleave(num_heads // descale.shape[1], 1).unsqueeze(2)


def _dequantized(
    query: torch.Tensor, keys: PagedKV, args: FlashArgs
) -> tuple[torch.Tensor, Scales, torch.Tensor | None]:
    """Return queries in a dtype that operators take, scales of the cache, and the factor on results.

    An operator takes one scale for each KV head. Scales that differ between sequences become factors of queries and
    results.
    """
    batch, num_heads, sequence = keys.lens.shape[0], query.shape[1], None
    scales: dict[str, Any] = {}
    factors: list[torch.Tensor] = []
    descales = {"q": args.query_scale, "k": args.k_descale, "v": args.v_descale}
    for name, descale in descales.items():
        if descale is not None and descale.numel() != 1:
            kv_heads, shape = keys.key_cache.shape[2], descale.shape
            if shape[-1] not in (1, kv_heads) or (descale.dim() != 1 and shape[:-1] != (batch,)):
                needs = f"[{batch}, {kv_heads}], [{kv_heads}], or one element"
                raise bad_argument(f"{name}_descale", describe(descale), needs)
    if not batch:  # all queries are padding, so there is no factor to take from a tensor without elements
        descales = dict.fromkeys(descales)
    if batch > 1 and any(x is not None and x.dim() == 2 and x.stride(0) for x in descales.values()):
        sequence = sequence_of_token(keys.starts, query.shape[0])[1]
    if descales["q"] is not None:
        factors.append(_of_query_heads(descales["q"], num_heads, sequence))
    after = None
    if keys.key_cache.dtype in QUANTIZED_DTYPES:
        for name in ("k", "v"):
            descale = descales[name]
            scale = None if descale is None else scale_of_heads(f"{name}_descale", descale, batch)
            if scale is None:
                scale = torch.ones(1, device=query.device)
                if descale is not None:
                    factor = _of_query_heads(descale, num_heads, sequence)
                    factors, after = ([*factors, factor], after) if name == "k" else (factors, factor)
            scales[f"{name}_scale"] = scale
    dtype = torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype
    if factors or dtype != query.dtype:
        exact = query.float()
        for factor in factors:
            exact = exact * factor
        query = exact.to(dtype)
    return query, (scales.get("k_scale"), scales.get("v_scale")), after
