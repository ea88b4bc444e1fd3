"""Checks of what metadata tell of an attention operator's arguments; `check_values.py` looks at values."""

from __future__ import annotations

import torch

from .._checks import bad_argument, check_tensor, describe, refuse_grad
from .call import NOT_NEGATIVE, AttentionCall, BatchCall
from .layout import PlanShape

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.int8)
MAX_HEAD_DIM = 512


def check_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    like_name: str,
    like: torch.Tensor,
    num_kv_heads: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    value_dim: int | None = None,
) -> None:
    """Checks a pair of caches against the tensor that is written to or attends over them.

    Args:
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        value_cache: Like `key_cache` by shape, except for its head_dim, and dtype.
        like_name: Name of `like` in errors.
        like: `[num_tokens, heads, head_dim]`; its dtype is the cache's, unless that is quantized.
        num_kv_heads: What the caches must have; None when any will do.
        k_scale: Scale of a quantized key cache, one element or one per KV head.
        v_scale: Scale of a quantized value cache.
        value_dim: head_dim of the value cache; None for any up to the largest.

    Raises:
        TypeError: A dtype that cannot be served.
        ValueError: A shape, stride or device that cannot be served.
    """
    layout = "[num_blocks, block_size, num_kv_heads, head_dim]"
    head_dim = like.shape[2]
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_tensor(name, cache, 4, layout, (like.dtype, *QUANTIZED_DTYPES), like.device)
        if num_kv_heads is not None and cache.shape[2] != num_kv_heads:
            raise bad_argument(name, f"{cache.shape[2]} heads", f"{num_kv_heads} heads as {like_name}")
        if cache.stride(3) != 1:
            raise bad_argument(name, f"strides {list(cache.stride())}", "a contiguous last dimension")
    if key_cache.shape[1] < 1:
        raise bad_argument("key_cache", f"block_size {key_cache.shape[1]}", "at least 1")
    if key_cache.shape[3] != head_dim:
        raise bad_argument("key_cache", f"head_dim {key_cache.shape[3]}", f"head_dim {head_dim} of {like_name}")
    if value_cache.shape[:3] != key_cache.shape[:3]:
        needs = f"{list(key_cache.shape[:3])} as key_cache, and any head_dim"
        raise bad_argument("value_cache", f"shape {list(value_cache.shape)}", needs)
    if value_dim is not None and value_cache.shape[3] != value_dim:
        raise bad_argument("value_cache", f"head_dim {value_cache.shape[3]}", f"head_dim {value_dim} of value")
    if not 1 <= value_cache.shape[3] <= MAX_HEAD_DIM:
        raise bad_argument("value_cache", f"head_dim {value_cache.shape[3]}", f"1 to {MAX_HEAD_DIM}")
    if value_cache.dtype != key_cache.dtype:
        raise bad_argument("value_cache", describe(value_cache), f"dtype {key_cache.dtype} as key_cache", TypeError)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if key_cache.dtype in QUANTIZED_DTYPES:
                raise bad_argument(name, "None", f"a scale, since the cache is {key_cache.dtype}")
            continue
        if key_cache.dtype not in QUANTIZED_DTYPES:
            raise bad_argument(name, describe(scale), f"None, since the cache is {key_cache.dtype}")
        if scale.device != like.device:
            raise bad_argument(name, f"device {scale.device}", f"device {like.device}")
        if not scale.dtype.is_floating_point or scale.dtype.itemsize < 2:
            raise bad_argument(name, describe(scale), "dtype float32, float16 or bfloat16", TypeError)
        if scale.numel() not in (1, key_cache.shape[2]) or scale.dim() > 1 or not scale.is_contiguous():
            raise bad_argument(
                name, describe(scale), f"one contiguous element or {key_cache.shape[2]}, one per KV head"
            )


def check_batch(call: BatchCall, device: torch.device, num_tokens: int | None = None) -> None:
    """Checks tables, lengths and options that a plan and an attention call share, from metadata alone.

    Args:
        call: Which keys are attended to.
        device: Where its tensors have to be.
        num_tokens: Rows of the query, where there is one.
    """
    tables, seq_lens, starts = call.block_tables, call.seq_lens, call.query_start_loc
    if call.head_tables and tables.dim() == 3:
        check_tensor("block_tables", tables, 3, "[num_seqs, num_kv_heads, max_blocks]", (torch.int32,), device)
        if call.num_shared_blocks:
            raise bad_argument("num_shared_blocks", call.num_shared_blocks, "0 with a block table per KV head")
    else:
        layout = "[num_seqs, max_blocks]"
        if tables.dim() == 3:
            layout += "; a table per KV head goes to sparse_gap_attention"
        elif call.head_tables:
            layout += " or [num_seqs, num_kv_heads, max_blocks]"
        check_tensor("block_tables", tables, 2, layout, (torch.int32,), device)
    check_tensor("seq_lens", seq_lens, 1, "[num_seqs]", (torch.int32,), device)
    check_tensor("query_start_loc", starts, 1, "[num_seqs + 1]", (torch.int32,), device)
    num_seqs, max_blocks = tables.shape[0], tables.shape[-1]
    if max_blocks > 1 and tables.stride(-1) != 1:
        raise bad_argument("block_tables", f"strides {list(tables.stride())}", "a contiguous last dimension")
    if seq_lens.shape[0] != num_seqs:
        raise bad_argument("seq_lens", f"{seq_lens.shape[0]} elements", f"{num_seqs}, the rows of block_tables")
    if starts.shape[0] != num_seqs + 1:
        needs = f"{num_seqs + 1}, one more than seq_lens"
        raise bad_argument("query_start_loc", f"{starts.shape[0]} elements", needs)
    vectors = {"seq_lens": seq_lens, "query_start_loc": starts}
    if call.query_positions is not None:
        vectors["query_positions"] = call.query_positions
        check_tensor("query_positions", call.query_positions, 1, "[num_tokens]", (torch.int32,), device)
        if num_tokens is not None and call.query_positions.shape[0] != num_tokens:
            got = f"{call.query_positions.shape[0]} elements"
            raise bad_argument("query_positions", got, f"{num_tokens}, one per row of query")
    for name, vector in vectors.items():
        if not vector.is_contiguous():
            raise bad_argument(name, f"strides {list(vector.stride())}", "a contiguous tensor")
    if not 0 <= call.num_shared_blocks <= max_blocks:
        raise bad_argument(
            "num_shared_blocks", call.num_shared_blocks, f"0 to {max_blocks}, the columns of block_tables"
        )
    refusals, values_of = NOT_NEGATIVE[type(call)]
    if min(values_of(call)) < 0:
        option = next(option for option in refusals if getattr(call, option) < 0)
        raise bad_argument(option, getattr(call, option), refusals[option])


def check_attention(call: AttentionCall) -> None:
    """Checks everything about an attention call that metadata tells, without reading a value.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape, stride, device or option.
        RuntimeError: A tensor that requires grad while grad mode is on.
    """
    query = call.query
    check_tensor("query", query, 3, "[num_tokens, num_heads, head_dim]", QUERY_DTYPES)
    num_tokens, num_heads, head_dim = query.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise bad_argument("query", f"head_dim {head_dim}", f"1 to {MAX_HEAD_DIM}")
    if query.stride(2) != 1 and head_dim > 1:
        raise bad_argument("query", f"strides {list(query.stride())}", "a contiguous last dimension")
    check_cache(call.key_cache, call.value_cache, "query", query, None, call.k_scale, call.v_scale)
    num_kv_heads = call.key_cache.shape[2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        needs = f"a divisor of query's {num_heads} heads in its third dimension"
        if call.key_cache.shape[1] and num_heads % call.key_cache.shape[1] == 0:
            needs += "; a cache [num_blocks, num_kv_heads, block_size, head_dim] goes in as cache.transpose(1, 2)"
        raise bad_argument("key_cache", f"{num_kv_heads} KV heads", needs)
    device = query.device
    check_batch(call, device, num_tokens)
    if call.block_tables.dim() == 3 and call.block_tables.shape[1] != num_kv_heads:
        got = f"shape {list(call.block_tables.shape)}"
        raise bad_argument("block_tables", got, f"{num_kv_heads} tables a sequence, one per KV head of key_cache")
    for name, per_head in (("alibi_slopes", call.alibi_slopes), ("sinks", call.sinks)):
        if per_head is None:
            continue
        check_tensor(name, per_head, 1, "[num_heads]", QUERY_DTYPES, device)
        if per_head.shape[0] != num_heads or not per_head.is_contiguous():
            raise bad_argument(name, describe(per_head), f"a contiguous tensor of {num_heads} elements, one per head")
    if call.tree_mask is not None:
        mask, layout = call.tree_mask, "[num_tokens, words]"
        check_tensor("tree_mask", mask, 2, layout, (torch.int32,), device)
        if mask.shape[0] != num_tokens or mask.shape[1] < 1:
            raise bad_argument("tree_mask", f"shape {list(mask.shape)}", f"{num_tokens} rows, one per row of query")
        if mask.shape[1] > 1 and mask.stride(1) != 1:
            raise bad_argument("tree_mask", f"strides {list(mask.stride())}", "a contiguous last dimension")
    if call.query_blocks is not None:
        lists = call.query_blocks
        check_tensor("query_blocks", lists, 3, "[num_tokens, num_kv_heads, top_k]", (torch.int32,), device)
        if lists.shape[:2] != (num_tokens, num_kv_heads):
            needs = f"[{num_tokens}, {num_kv_heads}, top_k], one list per row of query and KV head"
            raise bad_argument("query_blocks", f"shape {list(lists.shape)}", needs)
        if lists.shape[2] > 1 and lists.stride(2) != 1:
            raise bad_argument("query_blocks", f"strides {list(lists.stride())}", "a contiguous last dimension")
    if call.plan is not None:
        check_tensor("plan", call.plan, 1, "[n] from attention_plan", (torch.int32,), device)
        size = PlanShape.of(call.block_tables, call.block_size).size
        if call.plan.shape[0] != size or not call.plan.is_contiguous():
            needs = f"{size}, from attention_plan for these tables"
            raise bad_argument("plan", f"{call.plan.shape[0]} elements", needs)
    check_grad(call)


def check_grad(call: AttentionCall) -> None:
    """Raises RuntimeError for a tensor that requires grad while grad mode is on."""
    refuse_grad(
        query=call.query,
        key_cache=call.key_cache,
        value_cache=call.value_cache,
        sinks=call.sinks,
        alibi_slopes=call.alibi_slopes,
    )
