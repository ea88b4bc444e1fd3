"""The kernel that writes new keys and values into their cache slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from .bundles import kernel
from .codes import to_code


class WrittenTensors(NamedTuple):
    """The tensors of a cache write."""

    key_ptr: Any  # [num_tokens, KV_HEADS, HEAD_DIM]
    value_ptr: Any  # [num_tokens, KV_HEADS, VALUE_DIM]
    key_cache_ptr: Any  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    value_cache_ptr: Any  # [num_blocks, BLOCK_SIZE, KV_HEADS, VALUE_DIM]
    slots_ptr: Any  # [num_tokens]
    k_scale_ptr: Any
    v_scale_ptr: Any


class WrittenStrides(NamedTuple):
    """Elements between tokens and heads, and in the caches between blocks, slots and heads."""

    stride_kt: int
    stride_kh: int
    stride_vt: int
    stride_vh: int
    stride_kcb: int
    stride_kct: int
    stride_kch: int
    stride_vcb: int
    stride_vct: int
    stride_vch: int


@kernel(["num_rows"], tensors=WrittenTensors, strides=WrittenStrides)
def _reshape_and_cache_kernel(
    tensors, num_rows, strides,
    KIND: tl.constexpr, SCALES: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write keys and values. Grid (row tiles,); a row is one token and one head."""
    row = tl.cast(tl.program_id(0), tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    token = row // KV_HEADS
    head = row % KV_HEADS
    slot = tl.load(tensors.slots_ptr + token, mask=row < num_rows, other=-1)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    mask_k = (slot >= 0)[:, None] & (offs_d[None, :] < HEAD_DIM)
    mask_v = (slot >= 0)[:, None] & (offs_d[None, :] < VALUE_DIM)
    k_ptrs = tensors.key_ptr + (token * strides.stride_kt + head * strides.stride_kh)[:, None] + offs_d[None, :]
    k = tl.load(k_ptrs, mask=mask_k, other=0.0)
    v_ptrs = tensors.value_ptr + (token * strides.stride_vt + head * strides.stride_vh)[:, None] + offs_d[None, :]
    v = tl.load(v_ptrs, mask=mask_v, other=0.0)
    if SCALES > 0:
        k_scale = tl.load(tensors.k_scale_ptr + head * (SCALES - 1), mask=slot >= 0, other=1.0).to(tl.float32)
        v_scale = tl.load(tensors.v_scale_ptr + head * (SCALES - 1), mask=slot >= 0, other=1.0).to(tl.float32)
        k = to_code(k.to(tl.float32), k_scale[:, None], KIND)
        v = to_code(v.to(tl.float32), v_scale[:, None], KIND)
    k_row = block * strides.stride_kcb + offset * strides.stride_kct + head * strides.stride_kch
    v_row = block * strides.stride_vcb + offset * strides.stride_vct + head * strides.stride_vch
    tl.store(tensors.key_cache_ptr + k_row[:, None] + offs_d[None, :], k, mask=mask_k)
    tl.store(tensors.value_cache_ptr + v_row[:, None] + offs_d[None, :], v, mask=mask_v)
