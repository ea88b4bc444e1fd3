"""Codes of quantized caches. Stored value = x / scale in float8 e4m3 or int8; read value = stored * scale."""

from __future__ import annotations

import torch

from .checks import bad_argument

QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""Dtypes of quantized caches."""
PLAIN, INT8, E4M3 = 0, 1, 2


def code_kind(dtype: torch.dtype) -> int:
    """Return the constexpr that tells a kernel how a cache of `dtype` is stored."""
    return {torch.int8: INT8, torch.float8_e4m3fn: E4M3}.get(dtype, PLAIN)


def as_codes(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of a cache for kernels: float8 as uint8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def scale_kind(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> int:
    """Return the constexpr for scales in a kernel: 0 for none, 1 for one element each, 2 for one for each KV head."""
    if k_scale is None or v_scale is None:
        return 0
    return 2 if max(k_scale.numel(), v_scale.numel()) > 1 else 1


def equal_scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, num_kv_heads: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return both scales with equal lengths: a single scale is repeated for each KV head if the other is per head."""
    if k_scale is not None and v_scale is not None and k_scale.numel() != v_scale.numel():
        k_scale, v_scale = (scale.expand(num_kv_heads).contiguous() for scale in (k_scale, v_scale))
    return k_scale, v_scale


def refuse_nan(name: str, values: torch.Tensor) -> None:
    """Raise ValueError if values for int8 include NaN, for which int8 has no code. On a GPU this synchronizes."""
    if values.isnan().any():
        raise bad_argument(name, "NaN", "numbers, since int8 has no NaN: it would be stored as 0")


def quantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values `[num_tokens, num_kv_heads, head_dim]` / scale as the nearest codes of `dtype`.

    The scale has one element, or one for each KV head. Codes saturate, and ties round to even. NaN becomes 0x7F in e4m3
    and 0 in int8.
    """
    scaled = values.float() / scale.float().view(-1, 1)
    # Written out, because PyTorch keeps the sign of NaN in e4m3, and NaN in int8 depends on the processor.
    if dtype == torch.int8:
        return scaled.round_().clamp_(-128, 127).nan_to_num_(nan=0.0).to(dtype)
    return scaled.clamp_(-448.0, 448.0).masked_fill_(scaled.isnan(), torch.nan).to(dtype)
