"""Checks of an attention operator's arguments: of metadata, and of values on the CPU and in debug mode."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from .._core.checks import CACHE_LAYOUT, FLOATS, INT32, VALUE_LAYOUT, bad_argument, check_tensor, describe
from .._core.quantize import QUANTIZED_DTYPES
from .arguments import NOT_NEGATIVE, AttentionArgs
from .layout import PlanShape
from .plan_check import check_plan

MAX_HEAD_DIM, MAX_LATENT_DIM = 512, 1024


def _check_blocks(name: str, cache: torch.Tensor, like: torch.Tensor, num_kv_heads: int | None = None) -> None:
    """Check a cache of keys for the query or key `like`."""
    sizes = (None, None, num_kv_heads, like.shape[2])
    check_tensor(name, cache, CACHE_LAYOUT, (like.dtype, *QUANTIZED_DTYPES), like.device, sizes, rows=True)
    if cache.shape[1] < 1:
        raise bad_argument(name, f"block_size {cache.shape[1]}", "at least 1")


def check_cache(args: Any, like: torch.Tensor, num_kv_heads: int | None = None, value_dim: int | None = None) -> None:
    """Check the caches and scales of an operator's arguments against given sizes and against `like`.

    `like` is the query that attends over the caches, or the key that is written to them.
    """
    key_cache, value_cache = args.key_cache, args.value_cache
    _check_blocks("key_cache", key_cache, like, num_kv_heads)
    sizes = key_cache.shape[:3] if value_dim is None else (*key_cache.shape[:3], value_dim)
    check_tensor("value_cache", value_cache, VALUE_LAYOUT, (key_cache.dtype,), like.device, sizes, rows=True)
    if not 1 <= value_cache.shape[3] <= MAX_HEAD_DIM:
        raise bad_argument("value_cache", f"head_dim {value_cache.shape[3]}", f"1 to {MAX_HEAD_DIM}")
    _check_scales(key_cache, like.device, k_scale=args.k_scale, v_scale=args.v_scale)


def _check_scales(key_cache: torch.Tensor, device: torch.device, **scales: torch.Tensor | None) -> None:
    """Check that a quantized cache has scales of the right size and dtype, and that another cache has none."""
    for name, scale in scales.items():
        if scale is None:
            if key_cache.dtype in QUANTIZED_DTYPES:
                raise bad_argument(name, "None", f"a scale, since the cache is {key_cache.dtype}")
            continue
        if key_cache.dtype not in QUANTIZED_DTYPES:
            raise bad_argument(name, describe(scale), f"None, since the cache is {key_cache.dtype}")
        if scale.device != device:
            raise bad_argument(name, f"device {scale.device}", f"device {device}")
        if not scale.dtype.is_floating_point or scale.dtype.itemsize < 2:
            raise bad_argument(name, describe(scale), "dtype float32, float16 or bfloat16", TypeError)
        if scale.numel() not in (1, key_cache.shape[2]) or scale.dim() > 1 or not scale.is_contiguous():
            needs = f"one contiguous element or {key_cache.shape[2]}, one per KV head"
            raise bad_argument(name, describe(scale), needs)


def check_batch(args: Any, device: torch.device, head_tables: bool = True, num_tokens: int | None = None) -> None:
    """Check tables, lengths and options that a plan and an attention call share, from metadata alone.

    `head_tables`: block_tables may be one per KV head.
    """
    tables, layout = args.block_tables, "[num_seqs, max_blocks]"
    if head_tables and tables.dim() == 3:
        layout = "[num_seqs, num_kv_heads, max_blocks]"
        if args.num_shared_blocks:
            raise bad_argument("num_shared_blocks", args.num_shared_blocks, "0 with a block table per KV head")
    elif tables.dim() == 3:
        layout += "; a table per KV head goes to sparse_gap_attention"
    elif head_tables:
        layout += " or [num_seqs, num_kv_heads, max_blocks]"
    check_tensor("block_tables", tables, layout, INT32, device, rows=True)
    num_seqs, max_blocks = tables.shape[0], tables.shape[-1]
    check_tensor("seq_lens", args.seq_lens, "[num_seqs]", INT32, device, (num_seqs,), rows=True)
    check_tensor("query_start_loc", args.query_start_loc, "[num_seqs + 1]", INT32, device, (num_seqs + 1,), rows=True)
    if args.query_positions is not None:
        check_tensor("query_positions", args.query_positions, "[num_tokens]", INT32, device, (num_tokens,), rows=True)
    if not 0 <= args.num_shared_blocks <= max_blocks:
        needs = f"0 to {max_blocks}, the columns of block_tables"
        raise bad_argument("num_shared_blocks", args.num_shared_blocks, needs)
    for option, needs in NOT_NEGATIVE.items():
        if not 0 <= getattr(args, option, 0) < math.inf:
            raise bad_argument(option, getattr(args, option), needs)


def check_plan_size(name: str, plan: torch.Tensor, args: Any) -> None:
    """Check that a tensor can be a plan for the block tables of an attention call, or of `attention_plan`."""
    check_tensor(name, plan, "[n] from attention_plan", INT32, args.block_tables.device)
    size = PlanShape.of(args.block_tables, args.block_size).size
    if plan.shape[0] != size or not plan.is_contiguous():
        needs = f"{size} contiguous ones, from attention_plan for these tables"
        raise bad_argument(name, f"{plan.shape[0]} elements with strides {plan.stride()}", needs)


def check_attention(args: AttentionArgs) -> None:
    """Check all metadata of an attention call, without reading a value."""
    args = args.with_rows()
    query = args.query
    check_tensor("query", query, "[num_tokens, num_heads, head_dim]", FLOATS, rows=True)
    num_tokens, num_heads, head_dim = query.shape
    if not -math.inf < args.scale < math.inf:
        raise bad_argument("scale", args.scale, "a finite number")
    limit = MAX_LATENT_DIM if args.is_latent else MAX_HEAD_DIM
    if not 1 <= head_dim <= limit:
        raise bad_argument("query", f"head_dim {head_dim}", f"1 to {limit}")
    if num_heads < 1:
        raise bad_argument("query", f"shape {list(query.shape)}", "at least one head")
    if args.is_latent:  # `AttentionArgs.with_rows` has checked value_dim
        rows = args.key_cache
        _check_blocks("cache", rows, query)
        if rows.shape[3] % 16:
            raise bad_argument("cache", f"head_dim {rows.shape[3]}", "a multiple of 16")
        _check_scales(rows, query.device, k_scale=args.k_scale)
    else:
        check_cache(args, query)
    num_kv_heads = args.key_cache.shape[2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        needs = f"a divisor of query's {num_heads} heads as its number of heads"
        if args.key_cache.shape[1] and num_heads % args.key_cache.shape[1] == 0:
            needs += "; a cache [num_blocks, num_kv_heads, block_size, head_dim] goes in as cache.transpose(1, 2)"
        raise bad_argument("key_cache", f"{num_kv_heads} KV heads", needs)
    device = query.device
    check_batch(args, device, args.head_tables, num_tokens)
    if args.block_tables.dim() == 3 and args.block_tables.shape[1] != num_kv_heads:
        got = f"shape {list(args.block_tables.shape)}"
        raise bad_argument("block_tables", got, f"{num_kv_heads} tables a sequence, one per KV head of key_cache")
    for name, per_head in (("alibi_slopes", args.alibi_slopes), ("sinks", args.sinks)):
        if per_head is not None:
            check_tensor(name, per_head, "[num_heads]", FLOATS, device, (num_heads,), rows=True)
    if args.tree_mask is not None:
        check_tensor("tree_mask", args.tree_mask, "[num_tokens, words]", INT32, device, (num_tokens,), rows=True)
        if args.tree_mask.shape[1] < 1:
            raise bad_argument("tree_mask", f"shape {list(args.tree_mask.shape)}", "at least one word")
    if args.query_blocks is not None:
        layout, sizes = "[num_tokens, num_kv_heads, top_k]", (num_tokens, num_kv_heads)
        check_tensor("query_blocks", args.query_blocks, layout, INT32, device, sizes, rows=True)
    if args.plan is not None:
        check_plan_size("plan", args.plan, args)


def check_lengths(args: Any, lens: list[int], starts: list[int], max_seq_len: int | None = None) -> None:
    """Check that queries follow each other, and that each sequence fits its table and is as long as its queries.

    `lens` and `starts` are the values of seq_lens and query_start_loc, on the host.
    """
    most = getattr(args, "query", args.query_positions)
    if starts != sorted(starts) or starts[0] or (most is not None and starts[-1] > most.shape[0]):
        needs = "ascending from 0" + ("" if most is None else f" to at most {most.shape[0]} (num_tokens)")
        raise bad_argument("query_start_loc", starts, needs)
    capacity = args.block_tables.shape[-1] * args.block_size
    bound = capacity if max_seq_len is None else min(capacity, max_seq_len)
    shortest, longest = min(lens, default=0), max(lens, default=0)
    if shortest < 0 or longest > bound:
        needs = f"0 to {bound} (block_tables, max_seq_len)"
        raise bad_argument("seq_lens", f"values from {shortest} to {longest}", needs)
    for row, (length, begin, end) in enumerate(zip(lens, starts, starts[1:], strict=False)):
        if 0 < length < end - begin:
            needs = f"0 or at least {end - begin}, since lengths include the sequence's queries in this call"
            raise bad_argument("seq_lens", f"{length} in row {row}", needs)


def check_tables(tables: torch.Tensor, lens: list[int], block_size: int, num_blocks: int) -> None:
    """Check the block numbers of sequences. Entries after a sequence's end are never read and may hold anything."""
    own = tables[..., : -(-max(lens, default=0) // block_size)].cpu()
    if own.numel() and (own.min() < -1 or own.max() >= num_blocks):
        ends = torch.tensor(lens).view(-1, *[1] * (own.dim() - 1))
        wrong = (torch.arange(own.shape[-1]) * block_size < ends) & ((own < -1) | (own >= num_blocks))
        if wrong.any():
            row, *head, column = place = tuple(wrong.nonzero()[0].tolist())
            of_head = f", KV head {head[0]}" if head else ""
            got = f"{own[place]} in row {row}{of_head}, column {column}"
            raise bad_argument("block_tables", got, f"-1 to {num_blocks - 1}")


def check_attention_values(args: AttentionArgs) -> None:
    """Check lengths, block numbers, positions and the plan. This reads values, so on a device it synchronizes."""
    args = args.with_rows()
    num_blocks, block_size = args.key_cache.shape[0], args.block_size
    lens, starts = args.seq_lens.tolist(), args.query_start_loc.tolist()
    q_lens = [end - begin for begin, end in itertools.pairwise(starts)]
    check_lengths(args, lens, starts, args.max_seq_len)
    if not lens:
        return
    shortest = min(lens)
    if args.max_query_len is not None and max(q_lens) > args.max_query_len:
        needs = f"at least {max(q_lens)}, the longest of query_start_loc"
        raise bad_argument("max_query_len", args.max_query_len, needs)
    tables = args.block_tables.cpu()
    check_tables(tables, lens, block_size, num_blocks)
    if args.query_blocks is not None:
        _check_lists(args.query_blocks, args, lens, starts)
    if args.tree_mask is not None:
        _check_tree(args.tree_mask, args, starts)
    if num_shared := args.num_shared_blocks:
        if shortest < num_shared * block_size:
            needs = f"at most {shortest // block_size}, since a sequence is {shortest} long"
            raise bad_argument("num_shared_blocks", num_shared, needs)
        if (tables[:, :num_shared] != tables[:1, :num_shared]).any():
            raise bad_argument("block_tables", "rows that differ in shared columns", f"{num_shared} equal columns")
    if args.query_positions is not None:
        positions = args.query_positions.cpu()[: starts[-1]]
        owner = torch.repeat_interleave(torch.tensor(q_lens, device="cpu"))
        falls = (positions.diff() <= 0) & (owner.diff() == 0)
        if (positions < 0).any() or (args.tree_mask is None and falls.any()):
            raise bad_argument("query_positions", positions.tolist()[:16], "positions that ascend within each sequence")
    if args.plan is not None:
        check_plan(args)


def _check_lists(lists: torch.Tensor, args: AttentionArgs, lens: list[int], starts: list[int]) -> None:
    """Check that `query_blocks` names blocks of its sequence, ascending, then -1."""
    import numpy as np

    own = lists.cpu().numpy()[: starts[-1]]
    if not own.size:
        return
    blocks = [-(-length // args.block_size) for length in lens]
    # As an unsigned number, -1 is above all others.
    unsigned = own.view(np.uint32)
    if unsigned.max() >= min(blocks) and (own.min() < -1 or own.max() >= min(blocks)):
        bounds = np.repeat(blocks, np.diff(starts))[:, None, None]
        wrong = (own < -1) | (own >= bounds)
        if wrong.any():
            query, head, place = np.argwhere(wrong)[0].tolist()
            got = f"block {own[query, head, place]} for query {query}, KV head {head}"
            raise bad_argument("query_blocks", got, f"-1 to {bounds[query, 0, 0] - 1}, the blocks of its sequence")
    falls = unsigned[..., 1:] <= unsigned[..., :-1]
    if falls.any() and (falls := falls & (own[..., 1:] >= 0)).any():
        query, head, _ = np.argwhere(falls)[0].tolist()
        got = f"{own[query, head].tolist()[:16]} for query {query}, KV head {head}"
        raise bad_argument("query_blocks", got, "blocks that ascend, then -1")


def tree_bits(mask: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return the rows of a tree_mask as booleans: `[rows, num_keys]`."""
    bits = ((mask.cpu()[..., None] >> torch.arange(32, device="cpu")) & 1).bool().flatten(1)[:, :num_keys]
    return torch.nn.functional.pad(bits, (0, num_keys - bits.shape[1]))


def _check_tree(mask: torch.Tensor, args: AttentionArgs, starts: list[int]) -> None:
    """Check that `tree_mask` has enough bits for each sequence and, if causal, lets no token see a later one."""
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end - begin > 32 * mask.shape[1]:
            needs = f"{-(-(end - begin) // 32)}, 32 keys each, for the {end - begin} queries of sequence {i}"
            raise bad_argument("tree_mask", f"{mask.shape[1]} words", needs)
        if not args.causal:
            continue
        bits, row = tree_bits(mask[begin:end], 32 * mask.shape[1]), torch.arange(end - begin, device="cpu")[:, None]
        future = torch.arange(bits.shape[1], device="cpu") > row
        if args.query_positions is not None:
            depth = args.query_positions[begin:end].cpu()
            future[:, : end - begin] |= (depth >= depth[:, None]) & (row != row.T)
        if (bits & future).any():
            query, key = (bits & future).nonzero()[0].tolist()
            needs = (
                "only its own bit and bits of earlier tokens if causal, and of smaller positions with query_positions"
            )
            raise bad_argument("tree_mask", f"bit {key} in query {query} of sequence {i}", needs)
