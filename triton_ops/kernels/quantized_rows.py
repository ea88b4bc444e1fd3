"""Rows as 8-bit codes with a float32 scale each: scattered, and gathered and multiplied."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import from_e4m3, to_code


@triton.jit
def _row_base(slot, block_size, stride_b, stride_t):
    return (slot // block_size) * stride_b + (slot % block_size) * stride_t


@triton.jit(do_not_specialize=["block_size", "scales_block_size"])
def _scatter_quantized_kernel(
    source,  # [num_rows, width]
    cache,  # [num_blocks, block_size, width] uint8 (float8_e4m3fn) or int8
    scales, slot_mapping,  # [num_blocks, block_size] float32, [num_rows]
    width, block_size, scales_block_size,
    stride_source, stride_cb, stride_ct, stride_sb, stride_st,
    KIND: tl.constexpr, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, TILE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows,)."""
    row = tl.cast(tl.program_id(0), tl.int64)
    slot = tl.cast(tl.load(slot_mapping + row), tl.int64)
    if slot >= 0:
        source += row * stride_source
        cache += _row_base(slot, block_size, stride_cb, stride_ct)
        offs = tl.arange(0, TILE)
        x = tl.cast(tl.load(source + offs, mask=offs < width, other=0.0), tl.float32)
        size = tl.abs(x)
        peak = tl.where(size < float("inf"), size, float("inf"))  # NaN becomes infinity, which a maximum keeps
        if not SINGLE:
            for start in range(TILE, width, TILE):
                x = tl.cast(tl.load(source + start + offs, mask=start + offs < width, other=0.0), tl.float32)
                size = tl.abs(x)
                peak = tl.maximum(peak, tl.where(size < float("inf"), size, float("inf")))
        top = tl.max(peak, 0)
        scale = tl.maximum(tl.div_rn(top, LIMIT), SMALLEST)
        bad = top == float("inf")
        tl.store(scales + _row_base(slot, scales_block_size, stride_sb, stride_st), tl.where(bad, float("nan"), scale))
        for start in range(0, width, TILE):
            mask = start + offs < width
            if not SINGLE:
                x = tl.cast(tl.load(source + start + offs, mask=mask, other=0.0), tl.float32)
            code = to_code(tl.where(bad, 0.0, x), tl.where(bad, 1.0, scale), KIND)
            tl.store(cache + start + offs, code, mask=mask)


@triton.jit(do_not_specialize=["block_size", "scales_block_size", "chunks"])
def _gather_dequantized_kernel(
    cache,  # [num_blocks, block_size, width] uint8 (float8_e4m3fn) or int8
    scales, slot_mapping,  # [num_blocks, block_size] float32, [num_rows]
    target,  # [num_rows, width], written
    width, block_size, scales_block_size, chunks,
    stride_target, stride_cb, stride_ct, stride_sb, stride_st,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (num_rows * chunks,): `chunks` tiles of a row."""
    pid = tl.program_id(0)
    row = tl.cast(pid // chunks, tl.int64)
    offs = pid % chunks * TILE + tl.arange(0, TILE)
    mask = offs < width
    slot = tl.cast(tl.load(slot_mapping + row), tl.int64)
    here = slot >= 0
    base = _row_base(slot, block_size, stride_cb, stride_ct)
    scale = tl.load(scales + _row_base(slot, scales_block_size, stride_sb, stride_st), mask=here, other=0.0)
    code = tl.load(cache + base + offs, mask=offs < tl.where(here, width, 0), other=0)
    value = tl.cast(code if KIND == 1 else from_e4m3(code), tl.float32)
    tl.store(target + row * stride_target + offs, tl.cast(value * scale, target.dtype.element_ty), mask=mask)
