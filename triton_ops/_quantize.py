"""Codes of quantized caches: stored = x / scale in float8 e4m3 or int8, read = stored * scale."""

from __future__ import annotations

import torch

from ._checks import bad_argument

QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""Types of quantized caches."""
PLAIN, INT8, E4M3 = 0, 1, 2


def code_kind(dtype: torch.dtype) -> int:
    """The constexpr that tells a kernel how a cache of `dtype` is stored."""
    return {torch.int8: INT8, torch.float8_e4m3fn: E4M3}.get(dtype, PLAIN)


def as_codes(cache: torch.Tensor) -> torch.Tensor:
    """The cache as a kernel takes it: float8 as uint8, without a copy."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def scale_kind(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> int:
    """The constexpr that tells a kernel how scales come: 0 for none, 1 for one element each, 2 for one per KV head."""
    if k_scale is None or v_scale is None:
        return 0
    return 2 if max(k_scale.numel(), v_scale.numel()) > 1 else 1


def equal_scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, num_kv_heads: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both scales equally long."""
    if k_scale is not None and v_scale is not None and k_scale.numel() != v_scale.numel():
        k_scale, v_scale = (scale.expand(num_kv_heads).contiguous() for scale in (k_scale, v_scale))
    return k_scale, v_scale


def refuse_nan(name: str, values: torch.Tensor) -> None:
    """Raises ValueError for NaN on its way into int8, which has no code for it; reads values."""
    if values.isnan().any():
        raise bad_argument(name, "NaN", "numbers, since int8 has no NaN: it would be stored as 0")


def quantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values `[num_tokens, num_kv_heads, head_dim]` / scale, one or one per KV head, in the nearest code of `dtype`.

    Saturating, ties to even; NaN is 0x7F in e4m3 and 0 in int8.
    """
    scaled = values.float() / scale.float().view(-1, 1)
    # Spelled out: PyTorch keeps the sign of a NaN in e4m3, and what it gives in int8 is the processor's choice.
    if dtype == torch.int8:
        return scaled.round_().clamp_(-128, 127).nan_to_num_(nan=0.0).to(dtype)
    return scaled.clamp_(-448.0, 448.0).masked_fill_(scaled.isnan(), torch.nan).to(dtype)
