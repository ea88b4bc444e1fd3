"""Arguments that launches of attention share (results, tensors, constants, strides), and the launch that sums splits.

The launches are in `build.py` (keys found by block tables) and `lists.py` (lists of blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.cache import aligned
from .._core.launch import Launch, constants
from .._core.quantize import as_codes, equal_scales, scale_kind
from .._core.runtime import INTERPRET
from .arguments import AttentionArgs, Result, table_heads, table_strides
from .constants import Tiles, architecture, multiplies_from_shared, next_power_of_2
from .parameters import (
    E4M3_BITS,
    E4M3_PACKED,
    LOCAL_CODES,
    NATIVE_CODES,
    PACKED_CODES,
    PLAIN_CACHE,
    Strides,
    TileSizes,
    Traits,
)

# Splits that a program sums at once. A missing split costs the same instructions, so few are best: on sm_90, a row of
# head_dim 128 takes 228 instructions for 4 splits (tests/emulator). With 128 at once, 2 splits took 6,256. For few
# rows with more than twice as many splits, a program sums eight times as many at once, for a part of a head.
MERGED_SPLITS = 4

NewResults = Callable[[torch.Tensor], Result]


def build_results(args: AttentionArgs, dtype: torch.dtype | None = None) -> NewResults:
    """Return a function that allocates out and lse for a query; `dtype` None: that of the query."""
    query, dtype = args.query, dtype or args.query.dtype
    num_tokens, num_heads, head_dim = query.shape
    shape, with_lse = (num_tokens, num_heads, args.value_cache.shape[3]), args.with_lse
    is_packed = query.stride() == (num_heads * head_dim, head_dim, 1)
    like_query = is_packed and shape[2] == head_dim and dtype == query.dtype
    no_lse = query.new_empty(0, dtype=torch.float32)

    def new_results(query: torch.Tensor) -> Result:
        # For a contiguous tensor `empty_like` takes half the time of `new_empty`.
        out = torch.empty_like(query) if like_query else query.new_empty(shape, dtype=dtype)
        return out, query.new_empty(shape[:2], dtype=torch.float32) if with_lse else no_lse

    return new_results


def _codes(args: AttentionArgs) -> int:
    """Return how kernels read the cache, before their tiles decide between PACKED_CODES and LOCAL_CODES."""
    arch = architecture(args.query.device)
    if args.key_cache.dtype == torch.float8_e4m3fn and not arch.has_e4m3:
        return E4M3_PACKED if arch.name.startswith("sm_") else E4M3_BITS
    if args.key_cache.dtype == args.query.dtype:
        return PLAIN_CACHE
    is_packed = arch.name.startswith("sm_") and args.query.element_size() == 2
    return PACKED_CODES if is_packed else NATIVE_CODES


def converts_codes(args: AttentionArgs) -> bool:
    """Return whether kernels convert float8 by bit operations."""
    return _codes(args) in (E4M3_BITS, E4M3_PACKED)


def kernel_tensors(args: AttentionArgs, out: torch.Tensor, convert_codes: bool) -> tuple[Any, ...]:
    """Return a kernel's arguments before and after its results; dummies replace absent tensors and are never read."""
    key_cache, value_cache, k_scale, v_scale = args.key_cache, args.value_cache, args.k_scale, args.v_scale
    seq_lens, positions, tree = args.seq_lens, args.query_positions, args.tree_mask
    if value_cache is None:  # latent rows
        value_cache, v_scale = key_cache, k_scale
    if convert_codes:
        key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
    if k_scale is not None:
        k_scale, v_scale = equal_scales(k_scale, v_scale, key_cache.shape[2])
    behind = (args.block_tables, seq_lens, args.query_start_loc, seq_lens if positions is None else positions)
    alibi, sinks = args.alibi_slopes, args.sinks
    biases = (out if alibi is None else alibi, out if sinks is None else sinks)
    scales = (out if k_scale is None else k_scale, out if v_scale is None else v_scale)
    return (args.query, key_cache, value_cache), (*behind, *biases, *scales, seq_lens if tree is None else tree)


def compiled_for(args: AttentionArgs, tiles: Tiles) -> dict[str, Any]:
    """Return the constants that attention kernels are compiled for, in the order of their parameters."""
    num_heads, head_dim = args.query.shape[1:]
    value_dim, group = args.value_cache.shape[3], num_heads // args.key_cache.shape[2]
    rope_columns = head_dim - value_dim if args.is_latent else 0  # of a latent row, after its value
    key_columns = (head_dim - rope_columns) // tiles.value_splits
    value_columns = value_dim // tiles.value_splits
    codes = _codes(args)
    if codes == PACKED_CODES and not multiplies_from_shared(architecture(args.query.device).name, tiles.block_m):
        codes = LOCAL_CODES
    traits = Traits(
        POSITIONS=args.query_positions is not None,
        SINKS=args.sinks is not None,
        SCALES=scale_kind(args.k_scale, args.v_scale),
        CODES=codes,
        UPCAST=INTERPRET and args.query.dtype == torch.bfloat16,
        TABLE_HEADS=table_heads(args.block_tables),
        TREE=args.tree_mask is not None,
        WITH_LSE=args.with_lse,
        NUM_HEADS=num_heads,
        GROUP=group,
        BLOCK_SIZE=args.block_size,
        HEAD_DIM=key_columns,
        VALUE_DIM=value_dim,
        ROPE_COLUMNS=rope_columns,
    )
    sizes = TileSizes(
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, next_power_of_2(key_columns)),
        BLOCK_V=max(16, next_power_of_2(value_columns)),
        BLOCK_R=next_power_of_2(rope_columns),
        BLOCK_G=next_power_of_2(group),
        VALUE_SPLITS=tiles.value_splits,
    )
    return {**constants(args.terms), **constants(args.mask), **constants(traits), **constants(sizes)}


def strides_of(args: AttentionArgs) -> Strides:
    """Return the strides that attention kernels take."""
    tensors = (*args.query.stride()[:2], *args.key_cache.stride()[:3], *args.value_cache.stride()[:3])
    tree = (0, 0) if args.tree_mask is None else (32 * args.tree_mask.shape[1], args.tree_mask.stride(0))
    return Strides._make((*tensors, *table_strides(args.block_tables), *tree))


def build_sum_launch(args: AttentionArgs, rows: int, splits: int, values: tuple[int, ...], num_tables: int) -> Launch:
    """Return a launch that sums splits: a program for each of `rows` and each head.

    `num_tables` is the number of block tables of a sequence. The splits of each table are summed separately.

    For few rows of many splits, the kernel is compiled so that each program sums a part of a head. The two variants add
    in different orders, so batch-invariant mode must not choose between them by batch size. `pc.warmup` compiles both.
    """
    from ..kernels.attention import _merge_splits_kernel

    num_heads, value_dim = args.query.shape[1], args.value_cache.shape[3]
    block_s, block_v = MERGED_SPLITS, max(16, next_power_of_2(value_dim))
    is_few = rows * num_heads < 2 * architecture(args.query.device).num_processors
    if args.is_latent:
        block_v = min(block_v, 256)  # the many heads are enough programs
    elif is_few and splits > 2 * MERGED_SPLITS and not args.batch_invariant:
        block_s, block_v = 8 * MERGED_SPLITS, min(block_v, 32)
    constexprs = {
        "TABLE_HEADS": num_tables,
        "SINKS": args.sinks is not None,
        "WITH_LSE": args.with_lse,
        "NUM_HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "BLOCK_S": block_s,
        "BLOCK_V": block_v,
    }
    programs = (rows, num_heads, -(-value_dim // block_v))
    num_warps = max(1, min(4, block_s * block_v // 1024))  # 32 numbers a thread, since some spill with 64 on sm_86
    return Launch(_merge_splits_kernel, constexprs, programs, values, num_warps, same_alignment=aligned(*args))
