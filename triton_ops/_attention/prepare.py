"""What an attention call launches: which kernels, on which grids, with which constants.

Decided from metadata alone, so once for all calls of the same signature: for all layers of a step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .._kernel import constants, numbers
from .._launcher import KernelLaunch
from .._quantize import scale_kind
from .._triton import INTERPRET
from .call import AttentionCall
from .constants import (
    Architecture,
    Tiles,
    architecture,
    decode_tiles,
    next_power_of_2,
    prefill_tiles,
    programs_per_processor,
    specialized_tiles,
)
from .keys import E4M3_BITS, E4M3_PACKED, NATIVE_CODES, PLAIN_CACHE
from .layout import DECODE_QUERIES, MIN_SPLIT_TILES, TILE_KEYS, PlanShape
from .prepared import Grid, Prepared, Results
from .specialized_launch import is_describable, is_specializable, specialized_grid

# Batch-invariant mode: keys per split, whatever the batch. Longer contexts are summed from splits of this length.
INVARIANT_SPLIT_KEYS = 8192
MAX_PREFILL_SPLITS = 16


def wanted_items(arch: Architecture, programs_per_item: int) -> int:
    """How many work items of a decode keep every processor busy."""
    return max(1, programs_per_processor(arch.name) * arch.num_processors // programs_per_item)


def prepare(
    call: AttentionCall,
    with_lse: bool,
    tiled: bool,
    is_aligned: bool,
    count: bool,
    out_dtype: torch.dtype | None = None,
) -> Prepared:
    """Decides how a call that passed its checks is launched.

    A decode launch takes sequences of up to DECODE_QUERIES queries, a prefill launch the longer ones; a launch whose
    sequences cannot exist, by max_query_len or by shape, is left out.

    Args:
        call: The call.
        with_lse: Whether the lse is wanted.
        tiled: Whether even few queries are tiled, not decoded from the work list.
        is_aligned: Whether all of the call's tensors begin at multiples of 16 bytes.
        count: Whether kernels count the tiles they visit.
        out_dtype: Of the first result; None: like query.
    """
    query, key_cache = call.query, call.key_cache
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = call.value_cache.shape
    has_positions = call.query_positions is not None
    shape = PlanShape.of(call.block_tables, block_size)
    num_seqs, table_heads = call.seq_lens.shape[0], call.table_heads
    # A work item of a decode serves all KV heads, or the one whose table it is of.
    item_heads = num_kv_heads // table_heads
    options = call.plan_options(tiled)
    arch = architecture(query.device)
    group = num_heads // num_kv_heads
    longest = num_tokens if call.max_query_len is None else min(num_tokens, call.max_query_len)
    decode_q = max(1, min(longest, DECODE_QUERIES))
    quantized = key_cache.dtype != query.dtype
    has_tree = call.tree_mask is not None
    segments = has_positions and options.mask.BOUNDED and not has_tree
    terms = call.terms
    heavy = quantized or segments or has_tree or not terms.PLAIN
    kind = (max(head_dim, value_dim), query.element_size())
    decode = decode_tiles(arch.name, *kind, decode_q * group, quantized, group, block_size, not terms.PLAIN)
    prefill = prefill_tiles(arch.name, *kind, heavy, group, block_size)
    if has_tree:
        # A word of the mask for each score takes registers that wider tiles do not have: all of a thread's, which the
        # compiler would leave to a second program and spill.
        few = decode_tiles(arch.name, *kind, longest * group, quantized, group, block_size)
        tiles = few if longest * group <= prefill.block_m // 2 else prefill
        prefill = replace(tiles, block_n=min(tiles.block_n, 32), max_registers=255)
    row_tiles = -(-decode_q * group // decode.block_m)
    target_items = wanted_items(arch, item_heads * row_tiles)
    prefill_bound = num_tokens * group // prefill.block_m + num_seqs
    # Where even the longest sequences leave more than a decode's queries to each other one, none is a decode. (Padded
    # rows may make one seem longer than it is; tiled over queries it is right all the same.)
    prefill_only = has_tree or num_tokens - (num_seqs - 1) * longest > DECODE_QUERIES
    decode_queries = 0 if prefill_only else options.decode_queries
    run_decode = decode_queries > 0
    run_prefill = longest > decode_queries or not run_decode

    max_tiles = shape.max_tiles
    if call.max_seq_len is not None:
        max_tiles = min(max_tiles, -(-call.max_seq_len // TILE_KEYS))
    num_splits, split_tiles = 1, 0
    if call.batch_invariant:
        split_tiles = INVARIANT_SPLIT_KEYS // TILE_KEYS
        num_splits = max(1, -(-max_tiles // split_tiles))
    elif run_prefill and not segments:
        idle = 2 * arch.num_processors // (prefill_bound * num_kv_heads)
        num_splits = max(1, min(idle, max_tiles // 8, MAX_PREFILL_SPLITS))

    reached = max_tiles if has_positions else min(max_tiles, options.mask.max_tiles(decode_q))
    # At least one, which writes zeros, where no sequence has a key.
    decode_splits = max(1, min(shape.max_items, -(-reached // MIN_SPLIT_TILES))) if run_decode else 1
    codes, convert_codes = cache_codes(call, arch)
    describable = is_aligned and is_describable(call)
    special = specialized_tiles(arch.name, *kind)
    plain = call.causal and not (has_positions or heavy or call.batch_invariant or count or table_heads > 1)
    if not (run_prefill and plain and num_splits == 1 and describable and is_specializable(call, special, prefill)):
        special = None

    def constexprs(tiles: Tiles, decoding: bool) -> dict[str, object]:
        # A descriptor's tile lies in one block.
        block_n = min(tiles.block_n, TILE_KEYS) if describable and tiles.descriptors else tiles.block_n
        return {
            **constants(terms),
            **constants(options.mask),
            "DECODE": decoding,
            "DECODE_Q": decode_queries,
            "SPLIT_TILES": split_tiles,
            "POSITIONS": has_positions,
            "SINKS": call.sinks is not None,
            "SCALES": scale_kind(call.k_scale, call.v_scale),
            "CODES": codes,
            "UPCAST": INTERPRET and query.dtype == torch.bfloat16,
            "COUNT": count,
            "DESCRIPTORS": describable and tiles.descriptors and block_size % block_n == 0,
            "TABLE_HEADS": table_heads,
            "TREE": has_tree,
            "WITH_LSE": with_lse,
            "TWO_LOOPS": tiles.two_loops and not (segments or call.batch_invariant),
            "NUM_HEADS": num_heads,
            "GROUP": group,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": max(16, next_power_of_2(head_dim)),
            "BLOCK_V": max(16, next_power_of_2(value_dim)),
            "BLOCK_G": next_power_of_2(group),
            "SPECIALIZED_M": 0 if special is None or decoding else special.block_m,
            "EQUAL_STRIDES": key_cache.stride() == call.value_cache.stride(),
        }

    sizes = (num_seqs, num_tokens, shape.max_tiles, shape.max_items)
    limits = (*numbers(options.mask), options.key_begin)
    strides = (
        key_cache.shape[0],
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *call.value_cache.stride()[:3],
        *call.table_strides,
    )

    def grid(tiles: Tiles, decoding: bool, programs: tuple[int, int, int], splits: int, split_rows: int) -> Grid:
        split_heads = num_heads // table_heads if decoding else num_heads
        launch = KernelLaunch(
            constexprs(tiles, decoding), tiles.num_warps, tiles.num_stages, is_aligned, tiles.max_registers
        )
        values = (*sizes, decode_q, splits, call.scale, *numbers(terms), *limits, *strides, *call.tree_sizes)
        return Grid(launch, programs, values, split_rows, split_heads)

    decoding = tiling = specialized = None
    if run_decode:
        items = min(shape.max_items, shape.num_rows + target_items, shape.num_rows * decode_splits)
        split_rows = shape.max_items * decode_q if decode_splits > 1 else 0
        decoding = grid(decode, True, (items, item_heads * row_tiles, 1), decode_splits, split_rows)
    if run_prefill:
        split_rows = num_splits * num_tokens if num_splits > 1 else 0
        tiling = grid(prefill, False, (prefill_bound, num_kv_heads, num_splits), num_splits, split_rows)
    if special is not None:
        values = (*sizes, call.scale, *limits, *strides[:-1])
        specialized = specialized_grid(call, with_lse, special, decode_queries, values)
    dtype = out_dtype or query.dtype
    return Prepared(
        shape=shape,
        options=options,
        target_items=target_items,
        convert_codes=convert_codes,
        descriptors=special is not None or (describable and (decode.descriptors or prefill.descriptors)),
        decode=decoding,
        prefill=tiling,
        specialized=specialized,
        merge=_merge_grid(call, with_lse, decode_queries, decode_q, decode_splits, num_splits, is_aligned, arch),
        results=Results(
            (num_tokens, num_heads, value_dim),
            dtype,
            query.stride() == (num_heads * head_dim, head_dim, 1) and value_dim == head_dim and dtype == query.dtype,
            with_lse,
        ),
        no_lse=query.new_empty(0, dtype=torch.float32),
    )


def cache_codes(call: AttentionCall, arch: Architecture) -> tuple[int, bool]:
    """How the cache is stored, and whether kernels convert its float8 codes by bit operations."""
    if call.key_cache.dtype == torch.float8_e4m3fn and not arch.has_e4m3:
        return int(E4M3_PACKED if arch.name.startswith("sm_") else E4M3_BITS), True
    return int(NATIVE_CODES if call.key_cache.dtype != call.query.dtype else PLAIN_CACHE), False


def _merge_grid(
    call: AttentionCall,
    with_lse: bool,
    decode_queries: int,
    decode_q: int,
    decode_splits: int,
    num_splits: int,
    is_aligned: bool,
    arch: Architecture,
) -> Grid:
    """One program a row and head; a few rows of many splits are cut into parts of a head besides."""
    num_tokens, num_heads, _ = call.query.shape
    value_dim = call.value_cache.shape[3]
    by_sequence = decode_queries > 0 and num_splits == 1
    rows = call.seq_lens.shape[0] * decode_q if by_sequence else num_tokens
    block_v = max(16, next_power_of_2(value_dim))
    splits = next_power_of_2(max(decode_splits, num_splits, 2))
    if rows * num_heads < 2 * arch.num_processors and splits > 16 and not call.batch_invariant:
        block_v = min(block_v, 32)
    # The order of a sum follows from this number, which in batch-invariant mode may not follow from the batch.
    block_s = 16 if call.batch_invariant else min(splits, 8192 // block_v)
    constexprs = {
        "DECODE_Q": decode_queries,
        "BY_SEQUENCE": by_sequence,
        "TABLE_HEADS": call.table_heads,
        "SINKS": call.sinks is not None,
        "WITH_LSE": with_lse,
        "NUM_HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "BLOCK_S": block_s,
        "BLOCK_V": block_v,
    }
    programs = (rows, num_heads, -(-value_dim // block_v))
    numbers = (call.seq_lens.shape[0], num_tokens, decode_q, num_splits)
    return Grid(KernelLaunch(constexprs, merge_warps(block_s, block_v), None, is_aligned), programs, numbers)


def merge_warps(block_s: int, block_v: int) -> int:
    """Warps of a program that sums splits: as few as have 64 numbers a thread, since each computes where they are."""
    return max(1, min(4, block_s * block_v // 2048))
