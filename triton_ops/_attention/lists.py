"""Attention in which each query has its own list of blocks (`query_blocks`).

There is no plan of work shared by the layers of a step, because each layer has its own lists.

`_list_blocks_kernel` unites the lists of a few neighbouring queries, with a bit for each query that has the block in
its list. `_list_attention_kernel` walks over the union, so that a block that several queries chose is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._core.launch import Launch, constants, current_stream, numbers
from .arguments import AttentionArgs, table_heads, table_strides
from .constants import architecture, decode_tiles, latent_tiles, next_power_of_2
from .kernel_arguments import (
    NewResults,
    build_results,
    build_sum_launch,
    compiled_for,
    converts_codes,
    kernel_tensors,
    strides_of,
)

# Maximum number of queries whose lists are united. A mark is one byte with a bit for each query.
_MAX_QUERIES = 8
_MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class ListLaunch:
    """The kernels of a call, which unite lists, attend, and sum splits if there are any."""

    unite: Launch
    attend: Launch
    merge: Launch | None
    max_union: int
    stride_marks: int
    convert_codes: bool
    with_lse: bool
    new_results: NewResults

    def __call__(self, args: AttentionArgs) -> Any:
        """Unite the lists, attend, and sum the splits."""
        query, starts, unite, attend, merge = args.query, args.query_start_loc, self.unite, self.attend, self.merge
        tiles, device = unite.programs[:2], query.device
        out, lse = self.new_results(query)
        marks = torch.empty((*tiles, self.stride_marks), dtype=torch.uint8, device=device)
        union = torch.empty((*tiles, self.max_union, 2), dtype=torch.int32, device=device)
        counts = torch.empty(tiles, dtype=torch.int32, device=device)
        stream = None if query.is_cpu else current_stream()
        before, behind = kernel_tensors(args, out, self.convert_codes)
        unite((args.query_blocks, marks, union, counts, *behind[:4]), stream)
        splits = 0 if merge is None else attend.programs[2]
        parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=device)
        parts_lse = torch.empty((splits, *out.shape[:2]), dtype=torch.float32, device=device)
        attend((*before, out, lse, parts, parts_lse, *behind, union, counts), stream)
        if merge is not None:
            merge((out, lse, parts, parts_lse, parts, parts_lse, starts, starts, args.sinks), stream)
        return (out, lse) if self.with_lse else out


def build_lists(args: AttentionArgs) -> ListLaunch:
    """Return the launch of a call with query_blocks."""
    from ..kernels.lists import _list_attention_kernel, _list_blocks_kernel

    query, lists = args.query, args.query_blocks
    arch, is_aligned, convert_codes = architecture(query.device), args.is_aligned, converts_codes(args)
    assert lists is not None
    num_tokens, num_heads, head_dim = query.shape
    kv_heads, value_dim = args.value_cache.shape[2:]
    num_seqs, max_blocks = args.seq_lens.shape[0], args.block_tables.shape[-1]
    top_k, group = lists.shape[2], num_heads // kv_heads
    longest = num_tokens if args.max_query_len is None else min(num_tokens, args.max_query_len)
    # Each query has its own union if its bits must not depend on its neighbours.
    queries = 1 if args.batch_invariant else max(1, min(longest, _MAX_QUERIES, 16 // group))
    quantized, itemsize = args.key_cache.dtype != query.dtype, query.element_size()
    if args.is_latent:
        tiles = latent_tiles(arch.name, head_dim, value_dim, itemsize, queries * group, quantized, False, False)
    else:
        kind = (max(head_dim, value_dim), itemsize, queries * group, quantized)
        # Lists take registers: with the larger tiles of sm_90 they spill.
        tiles = decode_tiles(arch.name, *kind, spare_registers=True)
    max_union = max(1, min(max_blocks, queries * top_k))
    query_tiles, row_tiles = num_tokens // queries + num_seqs, -(-queries * group // tiles.block_m) * tiles.value_splits
    idle = 4 * arch.num_processors // (query_tiles * kv_heads * row_tiles)
    splits = 1 if args.batch_invariant else max(1, min(idle, max_union * args.block_size // 256, _MAX_SPLITS))
    # No two programs share a cache line.
    stride_marks = -(-max_blocks // 32) * 32
    sizes = (num_seqs, top_k, max_blocks, max_union, stride_marks)
    unite = Launch(
        _list_blocks_kernel,
        _unite_constants(args, queries),
        (query_tiles, kv_heads, 1),
        (*sizes, *numbers(args.mask), *lists.stride()[:2], *table_strides(args.block_tables)),
        same_alignment=is_aligned,
    )
    width = min(tiles.block_n, next_power_of_2(args.block_size))
    own = {"QUERIES": queries, "WIDTH": width}
    # Words of a tree's mask need more registers than two warps have.
    num_warps = tiles.num_warps if args.tree_mask is None else max(4, tiles.num_warps)
    # The limit allows more registers than ptxas chooses itself. To fit one more program, ptxas uses 128 for sm_80 and
    # 168 for sm_90, and spills.
    cap = 168 if convert_codes else 192 if quantized and head_dim <= 128 else 0
    if quantized and num_warps == 2:
        cap = tiles.max_registers
    constexprs = {**compiled_for(args, args.mask, tiles), **own}
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
    return ListLaunch(unite, attend, merge, max_union, stride_marks, convert_codes, args.with_lse, build_results(args))


def _unite_constants(args: AttentionArgs, queries: int) -> dict[str, Any]:
    """Return the constants for which the kernel that unites lists is compiled."""
    assert args.query_blocks is not None
    return {
        **constants(args.mask),
        "POSITIONS": args.query_positions is not None,
        "TABLE_HEADS": table_heads(args.block_tables),
        "KV_HEADS": args.key_cache.shape[2],
        "BLOCK_SIZE": args.block_size,
        "QUERIES": queries,
        # At least one entry for each thread. With fewer entries, several threads would mark the same block.
        "BLOCK_K": max(128, min(512, next_power_of_2(max(args.query_blocks.shape[2], args.block_tables.shape[-1])))),
        "TREE": args.tree_mask is not None,
    }
