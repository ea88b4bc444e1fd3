"""The kernel that merges two attention results by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def _merge_attention_kernel(
    out_ptr, lse_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM], [num_tokens, NUM_HEADS]
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr,
    num_rows,
    stride_at, stride_ah, stride_lat, stride_lah, stride_bt, stride_bh, stride_lbt, stride_lbh,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge two results. Grid (row tiles,); a row is one token and one head."""
    row = tl.cast(tl.program_id(0), tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    mask_r = row < num_rows
    lse_a = tl.load(lse_a_ptr + token * stride_lat + head * stride_lah, mask=mask_r, other=0.0)
    lse_b = tl.load(lse_b_ptr + token * stride_lbt + head * stride_lbh, mask=mask_r, other=0.0)
    top = tl.maximum(lse_a, lse_b)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(lse_a - safe)
    weight_b = tl.exp(lse_b - safe)
    total = weight_a + weight_b
    total = tl.where(total == 0, 1.0, total)
    # An operand with weight 0 is not read, whatever it holds.
    mask_a = (weight_a > 0)[:, None] & mask_r[:, None] & (offs_d[None, :] < HEAD_DIM)
    mask_b = (weight_b > 0)[:, None] & mask_r[:, None] & (offs_d[None, :] < HEAD_DIM)
    a = tl.load(out_a_ptr + (token * stride_at + head * stride_ah)[:, None] + offs_d[None, :], mask=mask_a, other=0.0)
    b = tl.load(out_b_ptr + (token * stride_bt + head * stride_bh)[:, None] + offs_d[None, :], mask=mask_b, other=0.0)
    merged = a.to(tl.float32) * (weight_a / total)[:, None] + b.to(tl.float32) * (weight_b / total)[:, None]
    mask = mask_r[:, None] & (offs_d[None, :] < HEAD_DIM)
    tl.store(out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], merged.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + row, top + tl.log(total), mask=mask_r)
