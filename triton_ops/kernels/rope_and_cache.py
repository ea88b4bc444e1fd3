"""The kernel that rotates queries and keys and writes the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from .bundles import kernel
from .codes import to_code
from .reshape_and_cache import WrittenStrides, WrittenTensors


@triton.jit
def _rotated_rows(
    x_ptr, stride, heads, mask_h, cos_sin_row, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the rotated heads of one token, in float32."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    offs_d = tl.arange(0, BLOCK_D)
    rotary = offs_d < ROTARY_DIM
    if INTERLEAVED:
        angle = offs_d // 2
        lower = offs_d % 2 == 0
        partner = tl.where(lower, offs_d + 1, offs_d - 1)
    else:
        lower = offs_d < HALF
        angle = tl.where(lower, offs_d, offs_d - HALF)
        partner = tl.where(lower, offs_d + HALF, offs_d - HALF)
    cos = tl.load(cos_sin_row + angle, mask=rotary, other=1.0).to(tl.float32)
    sin = tl.load(cos_sin_row + HALF + angle, mask=rotary, other=0.0).to(tl.float32)
    sin = tl.where(lower, -sin, sin)
    row = x_ptr + heads.to(tl.int64)[:, None] * stride
    mask = mask_h[:, None] & (offs_d[None, :] < HEAD_DIM)
    x = tl.load(row + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(row + partner[None, :], mask=mask_h[:, None] & rotary[None, :], other=0.0).to(tl.float32)
    return x * cos[None, :] + y * sin[None, :]


@kernel([], tensors=WrittenTensors, strides=WrittenStrides)
def _rope_and_cache_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    positions_ptr, cos_sin_ptr,  # [num_tokens], [max_positions, ROTARY_DIM]
    tensors, stride_qt, stride_qh, strides,
    KIND: tl.constexpr, SCALES: tl.constexpr, INTERLEAVED: tl.constexpr, ROTARY_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate and write. Grid (num_tokens, head tiles of the query); the first head tile also writes the cache."""
    token = tl.cast(tl.program_id(0), tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    cos_sin_row = cos_sin_ptr + tl.cast(tl.load(positions_ptr + token), tl.int64) * ROTARY_DIM
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = head < NUM_HEADS
    q = _rotated_rows(
        query_ptr + token * stride_qt, stride_qh, head, mask_h, cos_sin_row, ROTARY_DIM, INTERLEAVED, HEAD_DIM, BLOCK_D
    )
    tl.store(
        out_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :],
        q.to(out_ptr.dtype.element_ty),
        mask=mask_h[:, None] & (offs_d[None, :] < HEAD_DIM),
    )
    slot = tl.load(tensors.slots_ptr + token)
    if (tl.program_id(1) == 0) & (slot >= 0):
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        kv_head = tl.arange(0, BLOCK_K)
        mask_k = kv_head < KV_HEADS
        mask = mask_k[:, None] & (offs_d[None, :] < HEAD_DIM)
        k = _rotated_rows(
            tensors.key_ptr + token * strides.stride_kt, strides.stride_kh, kv_head, mask_k, cos_sin_row,
            ROTARY_DIM, INTERLEAVED, HEAD_DIM, BLOCK_D,
        ).to(tensors.key_ptr.dtype.element_ty)  # fmt: skip
        kv_head = kv_head.to(tl.int64)
        v = tl.load(
            tensors.value_ptr + token * strides.stride_vt + kv_head[:, None] * strides.stride_vh + offs_d[None, :],
            mask=mask,
            other=0.0,
        )
        if SCALES > 0:
            k_scale = tl.load(tensors.k_scale_ptr + kv_head * (SCALES - 1), mask=mask_k, other=1.0).to(tl.float32)
            v_scale = tl.load(tensors.v_scale_ptr + kv_head * (SCALES - 1), mask=mask_k, other=1.0).to(tl.float32)
            k = to_code(k.to(tl.float32), k_scale[:, None], KIND)
            v = to_code(v.to(tl.float32), v_scale[:, None], KIND)
        k_row = block * strides.stride_kcb + offset * strides.stride_kct + kv_head * strides.stride_kch
        v_row = block * strides.stride_vcb + offset * strides.stride_vct + kv_head * strides.stride_vch
        tl.store(tensors.key_cache_ptr + k_row[:, None] + offs_d[None, :], k, mask=mask)
        tl.store(tensors.value_cache_ptr + v_row[:, None] + offs_d[None, :], v, mask=mask)
