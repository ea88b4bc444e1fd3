"""Attention in which each query has its own list of blocks (`query_blocks`).

There is no plan of work shared by the layers of a step, because each layer has its own lists.

`_list_blocks_kernel` unites the lists of a few neighbouring queries, with a bit for each query that has the block in
its list. `_list_attention_kernel` walks over the union, so that a block that several queries chose is read once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.cache import aligned
from .._core.launch import Launch, constants, current_stream, numbers
from .arguments import AttentionArgs, table_heads, table_strides
from .constants import Tiles, architecture, decode_tiles, latent_tiles, next_power_of_2
from .kernel_arguments import build_results, build_sum_launch, compiled_for, converts_codes, kernel_tensors, strides_of

# Maximum number of queries whose lists are united. A mark is one byte with a bit for each query.
_MAX_QUERIES = 8
_MAX_SPLITS = 16


def build_lists(args: AttentionArgs) -> Callable[[AttentionArgs], Any]:
    """Return a function that runs calls of this kind: it unites lists, attends, and sums splits if there are any."""
    from ..kernels.lists import _list_attention_kernel

    query, lists = args.query, args.query_blocks
    arch, is_aligned, convert_codes = architecture(query.device), aligned(*args), converts_codes(args)
    assert lists is not None
    num_tokens, num_heads, head_dim = query.shape
    kv_heads = args.value_cache.shape[2]
    num_seqs, max_blocks = args.seq_lens.shape[0], args.block_tables.shape[-1]
    top_k, group = lists.shape[2], num_heads // kv_heads
    longest = num_tokens if args.max_query_len is None else min(num_tokens, args.max_query_len)
    # Each query has its own union if its bits must not depend on its neighbours.
    queries = 1 if args.batch_invariant else max(1, min(longest, _MAX_QUERIES, 16 // group))
    quantized, tiles = args.key_cache.dtype != query.dtype, _tiles(args, arch.name, queries * group)
    max_union = max(1, min(max_blocks, queries * top_k))
    query_tiles, row_tiles = num_tokens // queries + num_seqs, -(-queries * group // tiles.block_m) * tiles.value_splits
    idle = 4 * arch.num_processors // (query_tiles * kv_heads * row_tiles)
    splits = 1 if args.batch_invariant else max(1, min(idle, max_union * args.block_size // 256, _MAX_SPLITS))
    # No two programs share a cache line.
    stride_marks = -(-max_blocks // 32) * 32
    unite = _build_unite(args, queries, query_tiles, max_union, stride_marks)
    width = min(tiles.block_n, next_power_of_2(args.block_size))
    # Words of a tree's mask need more registers than two warps have.
    num_warps = tiles.num_warps if args.tree_mask is None else max(4, tiles.num_warps)
    # The limit allows more registers than ptxas chooses itself. To fit one more program, ptxas uses 128 for sm_80 and
    # 168 for sm_90, and spills.
    cap = 168 if convert_codes else 192 if quantized and head_dim <= 128 else 0
    if quantized and num_warps == 2:
        cap = tiles.max_registers
    constexprs = {**compiled_for(args, tiles), "QUERIES": queries, "WIDTH": width}
    lengths = (num_seqs, num_tokens, max_union, splits)
    attend = Launch(
        _list_attention_kernel,
        constexprs,
        (query_tiles, kv_heads * row_tiles, splits),
        (*lengths, args.scale, *numbers(args.terms), *numbers(args.mask), *strides_of(args)),
        num_warps,
        tiles.num_stages,
        is_aligned,
        cap,
    )
    merge = None
    if splits > 1:
        merge = build_sum_launch(args, num_tokens, splits, (num_seqs, num_tokens, 0, 1, splits, 0), 1)
    new_results, tiles_of_lists, with_lse = build_results(args), (query_tiles, kv_heads), args.with_lse

    def run(args: AttentionArgs) -> Any:
        query, starts, device = args.query, args.query_start_loc, args.query.device
        out, lse = new_results(query)
        marks = torch.empty((*tiles_of_lists, stride_marks), dtype=torch.uint8, device=device)
        union = torch.empty((*tiles_of_lists, max_union, 2), dtype=torch.int32, device=device)
        counts = torch.empty(tiles_of_lists, dtype=torch.int32, device=device)
        stream = None if query.is_cpu else current_stream()
        before, behind = kernel_tensors(args, out, convert_codes)
        unite((args.query_blocks, marks, union, counts, *behind[:4]), stream)
        num_parts = 0 if merge is None else splits
        parts = torch.empty((num_parts, *out.shape), dtype=torch.float32, device=device)
        parts_lse = torch.empty((num_parts, *out.shape[:2]), dtype=torch.float32, device=device)
        attend((*before, out, lse, parts, parts_lse, *behind, union, counts), stream)
        if merge is not None:
            merge((out, lse, parts, parts_lse, parts, parts_lse, starts, starts, args.sinks), stream)
        return (out, lse) if with_lse else out

    return run


def _tiles(args: AttentionArgs, arch: str, rows: int) -> Tiles:
    """Return the tiles of a program that attends with `rows` rows: the heads of a group, of some queries."""
    head_dim, value_dim, itemsize = args.query.shape[2], args.value_cache.shape[3], args.query.element_size()
    quantized = args.key_cache.dtype != args.query.dtype
    if args.is_latent:
        return latent_tiles(arch, head_dim, value_dim, itemsize, rows, quantized, False, False)
    # Lists take registers: with the larger tiles of sm_90 they spill.
    return decode_tiles(arch, max(head_dim, value_dim), itemsize, rows, quantized, spare_registers=True)


def _build_unite(args: AttentionArgs, queries: int, query_tiles: int, max_union: int, stride_marks: int) -> Launch:
    """Return the launch that unites the lists of each tile of `queries` queries."""
    from ..kernels.lists import _list_blocks_kernel

    lists, tables, kv_heads = args.query_blocks, args.block_tables, args.key_cache.shape[2]
    assert lists is not None
    top_k, max_blocks = lists.shape[2], tables.shape[-1]
    constexprs = {
        **constants(args.mask),
        "POSITIONS": args.query_positions is not None,
        "TABLE_HEADS": table_heads(tables),
        "KV_HEADS": kv_heads,
        "BLOCK_SIZE": args.block_size,
        "QUERIES": queries,
        # At least one entry for each thread. With fewer entries, several threads would mark the same block.
        "BLOCK_K": max(128, min(512, next_power_of_2(max(top_k, max_blocks)))),
        "TREE": args.tree_mask is not None,
    }
    lengths = (args.seq_lens.shape[0], top_k, max_blocks, max_union, stride_marks)
    values = (*lengths, *numbers(args.mask), *lists.stride()[:2], *table_strides(tables))
    programs = (query_tiles, kv_heads, 1)
    return Launch(_list_blocks_kernel, constexprs, programs, values, same_alignment=aligned(*args))
