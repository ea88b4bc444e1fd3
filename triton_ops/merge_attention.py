"""The operator that merges two attention results over disjoint keys into the result over all keys.

    lse = log(exp(lse_a) + exp(lse_b))
    out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

It reads two results and writes one, and computes in float32. See https://arxiv.org/abs/2501.01005, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._attention.arguments import Result
from ._attention.constants import next_power_of_2
from ._core.cache import aligned
from ._core.checks import FLOATS, check_tensor
from ._core.launch import Launch
from ._core.operator import operator


def _check(args: Any) -> None:
    out_a, lse_a, out_b, lse_b = args
    layout = "[num_tokens, num_heads, head_dim]"
    check_tensor("out_a", out_a, layout, FLOATS, rows=True)
    check_tensor("out_b", out_b, layout, (out_a.dtype,), out_a.device, out_a.shape, rows=True)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, "[num_tokens, num_heads]", (torch.float32,), out_a.device, out_a.shape[:2])


def merge_pair(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> Result:
    """Return the merged out, in float32, and its lse, computed in PyTorch."""
    lse = torch.logaddexp(lse_a, lse_b)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    # A form with the difference of the two results would overflow for 3e38 and -3e38.
    parts = []
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weight = (part - safe).exp_()[..., None]
        unread = weight == 0  # such rows may hold anything
        parts.append((out.masked_fill(unread, 0.0) if unread.any() else out, weight))
    (a, weight_a), (b, weight_b) = parts
    return (a * weight_a).addcmul_(b, weight_b), lse


def _cpu(args: Any) -> Result:
    out, lse = merge_pair(*args)
    return out.to(args.out_a.dtype).contiguous(), lse.masked_fill(lse == torch.inf, torch.nan).contiguous()


def build_merge_launch(
    args: tuple[torch.Tensor, ...], dtype: torch.dtype | None = None
) -> Callable[[tuple[torch.Tensor, ...]], Result]:
    """Return a function that merges four tensors like `args` on the device. `dtype` is the result's; None: out_a's."""
    from .kernels.merge_attention import _merge_attention_kernel

    num_tokens, num_heads, head_dim = args[0].shape
    num_rows = num_tokens * num_heads if head_dim else 0
    block_d = next_power_of_2(max(1, head_dim))
    block_r = max(1, 2048 // block_d)
    constexprs = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "BLOCK_R": block_r, "BLOCK_D": block_d}
    strides = [stride for tensor in args for stride in tensor.stride()[:2]]
    programs, is_aligned = (-(-num_rows // block_r), 1, 1), aligned(*args)
    launch = Launch(_merge_attention_kernel, constexprs, programs, (num_rows, *strides), same_alignment=is_aligned)
    dtype = dtype or args[0].dtype

    def run(args: tuple[torch.Tensor, ...]) -> Result:
        out_a = args[0]
        out = torch.empty(out_a.shape, dtype=dtype, device=out_a.device)
        lse = torch.empty(out_a.shape[:2], dtype=torch.float32, device=out_a.device)
        if num_rows:
            launch((out, lse, *args))
        return out, lse

    return run


@operator(check=_check, run=_cpu, build=build_merge_launch)
def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention results of the same queries over disjoint sets of keys.

    Only one of the two may include attention sinks. A row with lse -inf attended to no key, and its out is ignored.
    With lse inf, which FlashAttention 2 returns for such rows, the merged out and lse are NaN.

    Args:
        out_a: `[num_tokens, num_heads, head_dim]`, float16, bfloat16 or float32, with a contiguous last dimension.
        lse_a: `[num_tokens, num_heads]` float32, the natural logarithms that the `_with_lse` operators return.
        out_b: The other out, with the shape and dtype of out_a.
        lse_b: The other lse, with the shape of lse_a.

    Returns:
        The merged out, contiguous, and its lse.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, stride or device is invalid.
        RuntimeError: A tensor requires grad while grad mode is on.

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
    return out_a.new_empty(out_a.shape), lse_a.new_empty(out_a.shape[:2])
