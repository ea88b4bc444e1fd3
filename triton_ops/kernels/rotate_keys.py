"""Copies blocks of keys and turns each to another position."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import from_e4m3, to_code


@triton.jit
def load_keys(ptrs, mask, KIND: tl.constexpr):
    """Keys, or codes as the numbers they stand for, in float32."""
    if KIND == 2:
        return from_e4m3(tl.load(ptrs, mask=mask, other=0)).to(tl.float32)
    else:
        return tl.load(ptrs, mask=mask, other=0).to(tl.float32)


@triton.jit
def store_keys(ptrs, x, mask, KIND: tl.constexpr):
    """Keys in the cache's dtype, or the nearest codes."""
    if KIND == 0:
        tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)
    else:
        tl.store(ptrs, to_code(x, tl.full((1, 1), 1.0, tl.float32), KIND), mask=mask)


@triton.jit
def pair_columns(pair, IS_NEOX: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr):
    """Columns of both features of a pair."""
    if IS_NEOX:
        first = FIRST + pair
        second = FIRST + pair + HALF
    else:
        first = FIRST + 2 * pair
        second = FIRST + 2 * pair + 1
    return first, second


@triton.jit
def _rotate_keys_kernel(
    cache_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    source_ptr, target_ptr,  # [n]
    cos_ptr, sin_ptr,  # [n, HALF]
    stride_b, stride_t, stride_h,
    KIND: tl.constexpr, IS_NEOX: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, FIRST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Grid (n, row tiles): rows are the heads of a block's tokens; pairs begin at column FIRST.

    A thread holds both features of its pairs, so that a block may be turned in place: but where a tile has fewer pairs
    than a program threads, several hold the same pair, and none may read what another has written.
    """
    move = tl.cast(tl.program_id(0), tl.int64)
    source = tl.cast(tl.load(source_ptr + move), tl.int64)
    target = tl.cast(tl.load(target_ptr + move), tl.int64)
    if target >= 0:
        offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_r = offs_r < BLOCK_SIZE * KV_HEADS
        rows = (offs_r // KV_HEADS).to(tl.int64) * stride_t + (offs_r % KV_HEADS).to(tl.int64) * stride_h
        reads = offs_r < tl.where(source >= 0, BLOCK_SIZE * KV_HEADS, 0)
        source_ptrs = cache_ptr + (source * stride_b + rows)[:, None]
        target_ptrs = cache_ptr + (target * stride_b + rows)[:, None]
        pair = tl.arange(0, BLOCK_P)
        mask_p = pair < HALF
        first, second = pair_columns(pair, IS_NEOX, FIRST, HALF)
        cos = tl.load(cos_ptr + move * HALF + pair, mask=mask_p, other=1.0)[None, :]
        sin = tl.load(sin_ptr + move * HALF + pair, mask=mask_p, other=0.0)[None, :]
        mask = reads[:, None] & mask_p[None, :]
        a = load_keys(source_ptrs + first[None, :], mask, KIND)
        b = load_keys(source_ptrs + second[None, :], mask, KIND)
        if FIRST > 0:
            before = tl.arange(0, BLOCK_F)
            mask_f = (before < FIRST)[None, :]
            unturned = tl.load(source_ptrs + before[None, :], mask=reads[:, None] & mask_f, other=0)
        if HEAD_DIM > FIRST + 2 * HALF:
            rest = FIRST + 2 * HALF + tl.arange(0, BLOCK_D)
            mask_d = (rest < HEAD_DIM)[None, :]
            x = tl.load(source_ptrs + rest[None, :], mask=reads[:, None] & mask_d, other=0)
        tl.debug_barrier()
        mask = mask_r[:, None] & mask_p[None, :]
        store_keys(target_ptrs + first[None, :], a * cos - b * sin, mask, KIND)
        store_keys(target_ptrs + second[None, :], b * cos + a * sin, mask, KIND)
        if FIRST > 0:
            tl.store(target_ptrs + before[None, :], unturned, mask=mask_r[:, None] & mask_f)
        if HEAD_DIM > FIRST + 2 * HALF:
            tl.store(target_ptrs + rest[None, :], x, mask=mask_r[:, None] & mask_d)
