"""Which calls may be read through tensor descriptors, and the launch of the kernel with specialized warps."""

from __future__ import annotations

import torch

from .._kernel import constants
from .._launcher import KernelLaunch
from .._triton import INTERPRET
from .call import AttentionCall
from .constants import Tiles
from .layout import TILE_KEYS
from .prepared import Grid


def specialized_grid(
    call: AttentionCall, with_lse: bool, tiles: Tiles, decode_queries: int, values: tuple[float, ...]
) -> Grid:
    num_tokens, num_heads, head_dim = call.query.shape
    constexprs = {
        **constants(call.mask),
        "DECODE_Q": decode_queries,
        "SINKS": call.sinks is not None,
        "WITH_LSE": with_lse,
        "UPCAST": INTERPRET and call.query.dtype == torch.bfloat16,
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // call.key_cache.shape[2],
        "BLOCK_SIZE": call.key_cache.shape[1],
        "HEAD_DIM": head_dim,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "STAGES": tiles.num_stages,
    }
    programs = (num_tokens // tiles.block_m + call.seq_lens.shape[0], num_heads, 1)
    return Grid(KernelLaunch(constexprs, tiles.num_warps, tiles.num_stages), programs, values)


def is_specializable(call: AttentionCall, special: Tiles | None, prefill: Tiles) -> bool:
    """Whether layouts and tiles suit the kernel with specialized warps."""
    if special is None or call.key_cache.shape[1] % TILE_KEYS or call.scale <= 0:
        return False
    if call.value_cache.shape[3] != call.key_cache.shape[3]:
        return False
    group = call.query.shape[1] // call.key_cache.shape[2]
    # Its tiles of queries have to be whole tiles of rows of the general kernel.
    fits = prefill.block_m % group == 0 and special.block_m % (prefill.block_m // group) == 0
    return fits and all(stride * call.query.element_size() % 16 == 0 for stride in call.query.stride()[:2])


def is_describable(call: AttentionCall) -> bool:
    """Whether a head's rows lie in a matrix that the tensor memory accelerator takes: evenly, by 16 bytes, spaced."""
    for cache in (call.key_cache, call.value_cache):
        num_blocks, block_size, _, head_dim = cache.shape
        block, slot, head, _ = cache.stride()
        even = num_blocks > 0 and slot > 0 and block % slot == 0 and block >= block_size * slot
        if not even or num_blocks * (block // slot) >= 2**31:
            return False
        if any(n * cache.element_size() % 16 for n in (slot, head, head_dim)):
            return False
    return True
