"""Rows as 8-bit codes with one float32 scale each: scale = max(|x|) / limit, code = round(x / scale).

The limit is 448 for float8_e4m3fn and 127 for int8. The scale is at least the smallest normal float32; a row that holds
NaN or infinity gets the scale NaN and reads as NaN. Codes agree bit for bit with PyTorch's conversion.
"""

from __future__ import annotations

import torch

from .._attention.constants import next_power_of_2
from .._checks import bad_argument, check_caches, check_index, check_reachable, check_tensor, describe
from .._dispatch import LaunchCache, aligned
from .._launch import Launch
from .._quantize import QUANTIZED_DTYPES, as_codes, code_kind
from .layout import address_of

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal

_TILE = 2048

_scatters: LaunchCache[Launch] = LaunchCache()
_gathers: LaunchCache[Launch] = LaunchCache()


def check_quantized(cache: torch.Tensor, scales: torch.Tensor, index: torch.Tensor) -> None:
    """A cache of 8-bit codes with contiguous rows, its scales, and the slots that name its rows."""
    check_caches("cache", [cache])
    if cache.dtype not in QUANTIZED_DTYPES:
        raise bad_argument("cache", describe(cache), "dtype float8_e4m3fn or int8", TypeError)
    if not cache[:1, :1].is_contiguous():
        raise bad_argument("cache", f"strides {list(cache.stride())}", "contiguous features")
    check_tensor("scales", scales, 2, "[num_blocks, block_size]", (torch.float32,), cache.device)
    if scales.shape != cache.shape[:2]:
        raise bad_argument("scales", f"shape {list(scales.shape)}", f"{list(cache.shape[:2])}, one per slot of cache")
    check_index("slot_mapping", index, "[num_tokens]")
    check_reachable("cache", cache, index, "slot_mapping")
    check_reachable("scales", scales, index, "slot_mapping")


def quantize_rows(source: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[num_rows, *row]` and scales `[num_rows]` float32 of rows, in PyTorch."""
    values = source.float()
    flat = values.reshape(len(values), -1)
    peak = flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    scales = (peak / LIMITS[dtype]).clamp_(min=SMALLEST_SCALE)
    scales[~peak.isfinite()] = float("nan")
    scaled = flat / scales[:, None]
    if dtype == torch.int8:
        codes = scaled.round_().nan_to_num_(nan=0.0).clamp_(-127, 127).to(dtype)
    else:
        codes = scaled.clamp_(-448.0, 448.0).nan_to_num_(nan=0.0).to(dtype)
    return codes.view(source.shape), scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes `[num_rows, *row]` times scales `[num_rows]` in float32, rounded to `dtype`."""
    return codes.float().mul_(scales.view(-1, *(1,) * (codes.dim() - 1))).to(dtype)


def _row_strides(cache: torch.Tensor, scales: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of cache and scales the block sizes, and the strides of blocks and slots."""
    a, b = address_of(cache, 2), address_of(scales, 2)
    return (a.block_size, b.block_size), (a.block, a.slot, b.block, b.slot)


def launch_scatter_quantized(
    source: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Quantizes rows and scatters them by kernel; rows of source and cache are contiguous, arguments checked."""
    num_rows, width = source.shape
    assert source.stride(1) == 1 or width <= 1
    if not num_rows or not width:
        return
    tensors = (source, cache, scales, slot_mapping)
    launch = _scatters.get_or((), tensors, lambda: _build_scatter_launch(*tensors))
    launch((source, as_codes(cache), scales, slot_mapping))


def _build_scatter_launch(
    source: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor
) -> Launch:
    from ..kernels.quantized_rows import _scatter_quantized_kernel

    num_rows, width = source.shape
    tile = min(_TILE, next_power_of_2(width))
    constexprs = {
        "KIND": code_kind(cache.dtype),
        "LIMIT": LIMITS[cache.dtype],
        "SMALLEST": SMALLEST_SCALE,
        "TILE": tile,
        "SINGLE": width <= tile,
    }
    block_sizes, strides = _row_strides(cache, scales)
    numbers = (width, *block_sizes, source.stride(0), *strides)
    is_aligned = aligned(source, cache, scales, slot_mapping)
    return Launch(_scatter_quantized_kernel, constexprs, (num_rows, 1, 1), numbers, reusable=is_aligned)


def launch_gather_dequantized(
    cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor, target: torch.Tensor
) -> None:
    """Gathers rows and dequantizes them by kernel; rows of the cache are contiguous, arguments checked."""
    if not target.numel():
        return
    tensors = (cache, scales, slot_mapping, target)
    launch = _gathers.get_or((), tensors, lambda: _build_gather_launch(*tensors))
    launch((as_codes(cache), scales, slot_mapping, target))


def _build_gather_launch(
    cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor, target: torch.Tensor
) -> Launch:
    from ..kernels.quantized_rows import _gather_dequantized_kernel

    num_rows, width = target.shape
    tile = min(_TILE, next_power_of_2(width))
    chunks = -(-width // tile)
    block_sizes, strides = _row_strides(cache, scales)
    numbers = (width, *block_sizes, chunks, target.stride(0), *strides)
    constexprs = {"KIND": code_kind(cache.dtype), "TILE": tile}
    is_aligned = aligned(cache, scales, slot_mapping, target)
    return Launch(_gather_dequantized_kernel, constexprs, (num_rows * chunks, 1, 1), numbers, reusable=is_aligned)
