"""Merges two attention results over disjoint keys into the result over all of them.

    lse = log(exp(lse_a) + exp(lse_b));  out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

Moves three times out and lse; accumulates in float32. https://arxiv.org/abs/2501.01005, section 2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ._attention.constants import next_power_of_2
from ._checks import FLOATS, bad_argument, check_last_dim, check_tensor, refuse_grad
from ._dispatch import ChosenOnce, aligned
from ._kernel import Grid, KernelLaunch
from ._library import operator
from ._triton import require_triton, tl, triton

_PIECE_ELEMENTS = 1 << 18


def _check(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    layout = "[num_tokens, num_heads, head_dim]"
    check_tensor("out_a", out_a, 3, layout, FLOATS)
    check_tensor("out_b", out_b, 3, layout, (out_a.dtype,), out_a.device)
    if out_b.shape != out_a.shape:
        raise bad_argument("out_b", f"shape {list(out_b.shape)}", f"{list(out_a.shape)} as out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, 2, "[num_tokens, num_heads]", (torch.float32,), out_a.device)
        if lse.shape != out_a.shape[:2]:
            raise bad_argument(name, f"shape {list(lse.shape)}", f"{list(out_a.shape[:2])}")
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        check_last_dim(name, out)
    refuse_grad(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


def merge_attention_cpu(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `pc.merge_attention` computes, in PyTorch."""
    _check(out_a, lse_a, out_b, lse_b)
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.logaddexp(lse_a, lse_b)
    weight = torch.sigmoid(lse_b - lse_a)[..., None]
    any_dead = lse.numel() > 0 and torch.minimum(lse_a, lse_b).min().item() == -torch.inf
    if any_dead:
        dead_a, dead_b = ((part == -torch.inf)[..., None] for part in (lse_a, lse_b))
        weight = weight.masked_fill(dead_a, 1.0).masked_fill(dead_b, 0.0)
    # float32 copies are made in pieces that stay in the caches: fresh memory costs more than the arithmetic.
    whole = out.dtype == torch.float32
    rows = max(1, len(out) if whole else _PIECE_ELEMENTS // max(1, out[:1].numel()))
    for begin in range(0, len(out), rows):
        piece = slice(begin, begin + rows)
        a, b = out_a[piece].float(), out_b[piece].float()
        if any_dead:
            a, b = a.masked_fill(dead_a[piece], 0.0), b.masked_fill(dead_b[piece], 0.0)
        if whole:
            torch.lerp(a, b, weight, out=out)
        else:
            out[piece] = torch.lerp(a, b, weight[piece])
    return out, lse.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def _merge_attention_kernel(
    out_ptr, lse_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM], [num_tokens, NUM_HEADS]
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr,
    num_rows,
    stride_at, stride_ah, stride_lat, stride_lah, stride_bt, stride_bh, stride_lbt, stride_lbh,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles,), a row being one token and one head."""
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
    # Where a weight is 0 its operand is not read, whatever it holds.
    mask_a = (weight_a > 0)[:, None] & mask_r[:, None] & (offs_d[None, :] < HEAD_DIM)
    mask_b = (weight_b > 0)[:, None] & mask_r[:, None] & (offs_d[None, :] < HEAD_DIM)
    a = tl.load(out_a_ptr + (token * stride_at + head * stride_ah)[:, None] + offs_d[None, :], mask=mask_a, other=0.0)
    b = tl.load(out_b_ptr + (token * stride_bt + head * stride_bh)[:, None] + offs_d[None, :], mask=mask_b, other=0.0)
    merged = a.to(tl.float32) * (weight_a / total)[:, None] + b.to(tl.float32) * (weight_b / total)[:, None]
    mask = mask_r[:, None] & (offs_d[None, :] < HEAD_DIM)
    tl.store(out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], merged.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + row, top + tl.log(total), mask=mask_r)


Pair = tuple[torch.Tensor, torch.Tensor]


def choose_merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, dtype: torch.dtype
) -> Callable[..., Pair]:
    """What merges such results on the device, into one in `dtype`."""
    num_tokens, num_heads, head_dim = out_a.shape
    num_rows = num_tokens * num_heads if head_dim else 0
    block_d = next_power_of_2(max(1, head_dim))
    block_r = max(1, 2048 // block_d)
    constexprs = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "BLOCK_R": block_r, "BLOCK_D": block_d}
    tensors = (out_a, lse_a, out_b, lse_b)
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    launch = KernelLaunch(constexprs, 4, None, aligned(*tensors))
    return functools.partial(_launch, Grid(launch, (-(-num_rows // block_r), 1, 1), (num_rows, *strides)), dtype)


def _launch(
    grid: Grid, dtype: torch.dtype, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> Pair:
    out = torch.empty(out_a.shape, dtype=dtype, device=out_a.device)
    lse = torch.empty(out_a.shape[:2], dtype=torch.float32, device=out_a.device)
    if grid.programs[0]:
        grid.run(_merge_attention_kernel, (out, lse, out_a, lse_a, out_b, lse_b))
    return out, lse


def _choose(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> Callable[..., Pair]:
    require_triton("merge_attention")
    _check(out_a, lse_a, out_b, lse_b)
    return choose_merge(out_a, lse_a, out_b, lse_b, out_a.dtype)


_launch_merge_attention = ChosenOnce(_choose)


@operator(cpu=merge_attention_cpu, launch=_launch_merge_attention)
def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two attention results of the same queries over disjoint sets of keys.

    Attention sinks may be in one of the two only. An operand with nothing to attend to (lse -inf) does not count,
    whatever its out holds.

    Args:
        out_a: `[num_tokens, num_heads, head_dim]`, float16, bfloat16 or float32; contiguous last dimension.
        lse_a: `[num_tokens, num_heads]` float32, natural logarithms, as the `_with_lse` ops return.
        out_b: Like out_a.
        lse_b: Like lse_a.

    Returns:
        out like out_a, contiguous, and its lse.

    Raises:
        TypeError: A wrong type or dtype.
        ValueError: A wrong shape, stride or device.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> cache, query = torch.randn(4, 16, 2, 64), torch.randn(1, 4, 64)
        >>> both = (one(32), one(0, 1), 0.125)  # a query over two blocks, whole and each half for itself
        >>> whole = pc.paged_attention(query, cache, cache, one(2, 3)[None], *both)
        >>> first = pc.sparse_gap_attention_with_lse(query, cache, cache, one(2, -1)[None], *both[:2], None, 0.125)
        >>> second = pc.sparse_gap_attention_with_lse(query, cache, cache, one(-1, 3)[None], *both[:2], None, 0.125)
        >>> out, lse = pc.merge_attention(*first, *second)
        >>> torch.allclose(out, whole, atol=1e-5)
        True
    """
    _check(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(out_a.shape[:2])
