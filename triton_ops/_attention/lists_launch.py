"""Launches the kernels of a call with query_blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._kernel import constants, numbers
from .._launcher import KernelLaunch, current_stream
from .._quantize import as_codes, equal_scales, scale_kind
from .._triton import INTERPRET
from .call import AttentionCall
from .constants import architecture, decode_tiles, next_power_of_2
from .lists import _list_attention_kernel, _list_blocks_kernel
from .merge import _merge_splits_kernel
from .prepare import cache_codes

Result = tuple[torch.Tensor, torch.Tensor]

# Queries whose lists are united: as many as fill the rows of the smallest product, and bits of a mark.
_MAX_QUERIES = 8
_MAX_SPLITS = 16


def prepare_lists(
    call: AttentionCall, with_lse: bool, is_aligned: bool, visits: torch.Tensor | None
) -> Callable[[tuple[Any, ...]], Result]:
    """Decides how a call that passed its checks is launched; what runs it takes its TENSORS."""
    query, lists = call.query, call.query_blocks
    assert lists is not None
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, kv_heads, value_dim = call.value_cache.shape
    num_seqs, max_blocks = call.seq_lens.shape[0], call.block_tables.shape[-1]
    top_k, group = lists.shape[2], num_heads // kv_heads
    arch = architecture(query.device)
    longest = num_tokens if call.max_query_len is None else min(num_tokens, call.max_query_len)
    # One query at a time where its bits may not depend on those beside it.
    queries = 1 if call.batch_invariant else max(1, min(longest, _MAX_QUERIES, 16 // group))
    tiles = decode_tiles(
        arch.name,
        max(head_dim, value_dim),
        query.element_size(),
        queries * group,
        call.key_cache.dtype != query.dtype,
        group,
        block_size,
    )
    max_union = max(1, min(max_blocks, queries * top_k))
    programs = (num_tokens // queries + num_seqs, kv_heads)
    row_tiles = -(-queries * group // tiles.block_m)
    idle = 4 * arch.num_processors // (programs[0] * kv_heads * row_tiles)
    num_splits = 1 if call.batch_invariant else max(1, min(idle, max_union * block_size // 256, _MAX_SPLITS))
    codes, convert_codes = cache_codes(call, arch)
    # Programs share no cache line.
    stride_marks = -(-max_blocks // 32) * 32
    mask, terms = call.mask, call.terms
    has_positions = call.query_positions is not None
    unite = KernelLaunch(
        {
            **constants(mask),
            "POSITIONS": has_positions,
            "TABLE_HEADS": call.table_heads,
            "KV_HEADS": kv_heads,
            "BLOCK_SIZE": block_size,
            "QUERIES": queries,
            # At least one a thread: with fewer, several threads would mark the same block.
            "BLOCK_K": max(128, min(512, next_power_of_2(max(top_k, max_blocks)))),
            "TREE": call.tree_mask is not None,
        },
        4,
        None,
        is_aligned,
    )
    attend = KernelLaunch(
        {
            **constants(terms),
            **constants(mask),
            "POSITIONS": has_positions,
            "SINKS": call.sinks is not None,
            "SCALES": scale_kind(call.k_scale, call.v_scale),
            "CODES": codes,
            "UPCAST": INTERPRET and query.dtype == torch.bfloat16,
            "COUNT": visits is not None,
            "TREE": call.tree_mask is not None,
            "TABLE_HEADS": call.table_heads,
            "WITH_LSE": with_lse,
            "NUM_HEADS": num_heads,
            "GROUP": group,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "QUERIES": queries,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "BLOCK_V": max(16, next_power_of_2(value_dim)),
            "BLOCK_G": next_power_of_2(group),
            "WIDTH": min(tiles.block_n, next_power_of_2(block_size)),
        },
        # Words of a tree's mask take registers that two warps do not have.
        tiles.num_warps if call.tree_mask is None else max(4, tiles.num_warps),
        tiles.num_stages,
        is_aligned,
        # triton 3.6 stops at 128 for sm_80, and spills.
        168 if convert_codes else 0,
    )
    block_v = max(16, next_power_of_2(value_dim))
    merge = KernelLaunch(
        {
            "DECODE_Q": 0,
            "BY_SEQUENCE": False,
            "TABLE_HEADS": 1,
            "SINKS": call.sinks is not None,
            "WITH_LSE": with_lse,
            "NUM_HEADS": num_heads,
            "VALUE_DIM": value_dim,
            "BLOCK_S": next_power_of_2(max(2, num_splits)),
            "BLOCK_V": block_v,
        },
        4,
        None,
        is_aligned,
    )
    unite_values: tuple[float, ...] = (num_seqs, top_k, max_blocks, max_union, stride_marks, *numbers(mask))
    unite_values += (*lists.stride()[:2], *call.table_strides)
    values: tuple[float, ...] = (num_seqs, num_tokens, max_union, num_splits)
    values += (call.scale, *numbers(terms), *numbers(mask))
    values += (*query.stride()[:2], *call.key_cache.stride()[:3], *call.value_cache.stride()[:3])
    values += (*call.table_strides, *call.tree_sizes)

    def run(tensors: tuple[Any, ...]) -> Result:
        query, key_cache, value_cache, tables, seq_lens, starts, positions, _, *others = tensors
        alibi, sinks, k_scale, v_scale, tree, lists = others
        device = query.device
        out = query.new_empty((num_tokens, num_heads, value_dim))
        lse = query.new_empty((num_tokens, num_heads) if with_lse else 0, dtype=torch.float32)
        marks = torch.empty((*programs, stride_marks), dtype=torch.uint8, device=device)
        union = torch.empty((*programs, max_union, 2), dtype=torch.int32, device=device)
        counts = torch.empty(programs, dtype=torch.int32, device=device)
        stream = None if query.is_cpu else current_stream()
        if convert_codes:
            key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
        if k_scale is not None:
            k_scale, v_scale = equal_scales(k_scale, v_scale, kv_heads)
        positions = seq_lens if positions is None else positions
        others = [out if tensor is None else tensor for tensor in (alibi, sinks, k_scale, v_scale)]
        masks = seq_lens if tree is None else tree
        lengths = (tables, seq_lens, starts, positions)
        grid = (*programs, 1)
        unite.launch(_list_blocks_kernel, grid, (lists, marks, union, counts, *lengths), unite_values, stream)
        parts = (out, out)
        if num_splits > 1:
            shape = (num_splits, num_tokens, num_heads)
            parts = (
                torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
                torch.empty(shape, dtype=torch.float32, device=device),
            )
        seen = seq_lens if visits is None else visits
        attend.launch(
            _list_attention_kernel,
            (programs[0], kv_heads * row_tiles, num_splits),
            (query, key_cache, value_cache, out, lse, *parts, union, counts, *lengths, *others, seen, masks),
            values,
            stream,
        )
        if num_splits > 1:
            merge.launch(
                _merge_splits_kernel,
                (num_tokens, num_heads, 1),
                (out, lse, *parts, *parts, starts, starts, others[1]),
                (num_seqs, num_tokens, 1, num_splits),
                stream,
            )
        return out, lse

    return run
