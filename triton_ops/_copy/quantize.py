"""Rows as 8-bit codes with one float32 scale each: scale = max(|x|) / limit, code = round(x / scale).

The limit is 448 for float8_e4m3fn and 127 for int8. The scale is at least the smallest normal float32; a row that holds
NaN or infinity gets the scale NaN and reads as NaN. Codes agree bit for bit with PyTorch's conversion.
"""

from __future__ import annotations

import torch

from .._checks import bad_argument, check_caches, check_index, check_reachable, check_tensor, describe
from .._dispatch import Memo, aligned
from .._kernel import KernelLaunch
from .._quantize import CODES, as_codes, code_kind, from_e4m3, to_code
from .._triton import tl, triton
from .layout import address_of

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal

_TILE = 2048

_scatters: Memo[KernelLaunch] = Memo()
_gathers: Memo[KernelLaunch] = Memo()


def check_quantized(cache: torch.Tensor, scales: torch.Tensor, index: torch.Tensor) -> None:
    """A cache of 8-bit codes with contiguous rows, its scales, and the slots that name its rows."""
    check_caches("cache", [cache])
    if cache.dtype not in CODES:
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
    tile = min(_TILE, triton.next_power_of_2(width))
    tensors = (source, cache, scales, slot_mapping)
    launch = _scatters.get((), tensors)
    if launch is None:
        constexprs = {
            "KIND": code_kind(cache.dtype),
            "LIMIT": LIMITS[cache.dtype],
            "SMALLEST": SMALLEST_SCALE,
            "TILE": tile,
            "SINGLE": width <= tile,
        }
        launch = _scatters.keep((), tensors, KernelLaunch(constexprs, 4, None, aligned(*tensors)))
    block_sizes, strides = _row_strides(cache, scales)
    numbers = (width, *block_sizes, source.stride(0), *strides)
    launch.launch(_scatter_quantized_kernel, (num_rows, 1, 1), (source, as_codes(cache), scales, slot_mapping), numbers)


def launch_gather_dequantized(
    cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor, target: torch.Tensor
) -> None:
    """Gathers rows and dequantizes them by kernel; rows of the cache are contiguous, arguments checked."""
    num_rows, width = target.shape
    if not target.numel():
        return
    tile = min(_TILE, triton.next_power_of_2(width))
    chunks = triton.cdiv(width, tile)
    tensors = (cache, scales, slot_mapping, target)
    launch = _gathers.get((), tensors)
    if launch is None:
        constexprs = {"KIND": code_kind(cache.dtype), "TILE": tile}
        launch = _gathers.keep((), tensors, KernelLaunch(constexprs, 4, None, aligned(*tensors)))
    block_sizes, strides = _row_strides(cache, scales)
    numbers = (width, *block_sizes, chunks, target.stride(0), *strides)
    launch.launch(
        _gather_dequantized_kernel, (num_rows * chunks, 1, 1), (as_codes(cache), scales, slot_mapping, target), numbers
    )
