"""The kernel that copies keys and values of tokens to other slots and rotates the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import from_e4m3, to_code


@triton.jit
def load_keys(ptrs, mask, KIND: tl.constexpr):
    """Load keys as float32. float8 codes (KIND 2, see `code_kind`) are converted to their values."""
    if KIND == 2:
        return from_e4m3(tl.load(ptrs, mask=mask, other=0)).to(tl.float32)
    else:
        return tl.load(ptrs, mask=mask, other=0).to(tl.float32)


@triton.jit
def store_keys(ptrs, x, mask, KIND: tl.constexpr):
    """Store keys in the cache's dtype, or the nearest codes."""
    if KIND == 0:
        tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)
    else:
        tl.store(ptrs, to_code(x, tl.full((1, 1), 1.0, tl.float32), KIND), mask=mask)


@triton.jit
def pair_columns(pair, IS_NEOX: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr):
    """Return the columns of both features of a pair."""
    if IS_NEOX:
        first = FIRST + pair
        second = FIRST + pair + HALF
    else:
        first = FIRST + 2 * pair
        second = FIRST + 2 * pair + 1
    return first, second


@triton.jit
def _move_slots_kernel(
    key_ptr, value_ptr,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM and VALUE_DIM]
    source_ptr, target_ptr,  # [n]
    cos_ptr, sin_ptr,  # [n, HALF]
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    KIND: tl.constexpr, IS_NEOX: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Move one token's keys and values. Grid (n, tiles of heads).

    A negative source reads zeros, and a negative target writes nothing.
    """
    move = tl.cast(tl.program_id(0), tl.int64)
    source = tl.cast(tl.load(source_ptr + move), tl.int64)
    target = tl.cast(tl.load(target_ptr + move), tl.int64)
    if target >= 0:
        offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        writes = offs_h < KV_HEADS
        reads = offs_h < tl.where(source >= 0, KV_HEADS, 0)
        source = tl.maximum(source, 0)
        heads = offs_h.to(tl.int64) * stride_kh
        read_ptrs = key_ptr + (source // BLOCK_SIZE * stride_kb + source % BLOCK_SIZE * stride_kt + heads)[:, None]
        write_ptrs = key_ptr + (target // BLOCK_SIZE * stride_kb + target % BLOCK_SIZE * stride_kt + heads)[:, None]
        if HALF > 0:
            pair = tl.arange(0, BLOCK_P)
            mask_p = pair < HALF
            first, second = pair_columns(pair, IS_NEOX, FIRST, HALF)
            cos = tl.load(cos_ptr + move * HALF + pair, mask=mask_p, other=1.0)[None, :]
            sin = tl.load(sin_ptr + move * HALF + pair, mask=mask_p, other=0.0)[None, :]
            mask = reads[:, None] & mask_p[None, :]
            a = load_keys(read_ptrs + first[None, :], mask, KIND)
            b = load_keys(read_ptrs + second[None, :], mask, KIND)
        if HEAD_DIM > 2 * HALF:
            offs_d = tl.arange(0, BLOCK_D)
            mask_d = (((offs_d < FIRST) | (offs_d >= FIRST + 2 * HALF)) & (offs_d < HEAD_DIM))[None, :]
            x = tl.load(read_ptrs + offs_d[None, :], mask=reads[:, None] & mask_d, other=0)
        if VALUE_DIM > 0:
            offs_v = tl.arange(0, BLOCK_V)
            mask_v = (offs_v < VALUE_DIM)[None, :]
            rows = value_ptr + (offs_h.to(tl.int64) * stride_vh)[:, None] + offs_v[None, :]
            v = tl.load(
                rows + (source // BLOCK_SIZE * stride_vb + source % BLOCK_SIZE * stride_vt),
                mask=reads[:, None] & mask_v, other=0,
            )  # fmt: skip
        # All threads must load before one stores: a token may be its own target, and threads may share a pair.
        tl.debug_barrier()
        if HALF > 0:
            mask = writes[:, None] & mask_p[None, :]
            store_keys(write_ptrs + first[None, :], a * cos - b * sin, mask, KIND)
            store_keys(write_ptrs + second[None, :], b * cos + a * sin, mask, KIND)
        if HEAD_DIM > 2 * HALF:
            tl.store(write_ptrs + offs_d[None, :], x, mask=writes[:, None] & mask_d)
        if VALUE_DIM > 0:
            place = target // BLOCK_SIZE * stride_vb + target % BLOCK_SIZE * stride_vt
            tl.store(rows + place, v, mask=writes[:, None] & mask_v)
