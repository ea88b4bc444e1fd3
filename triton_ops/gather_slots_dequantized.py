"""Gathers token vectors of an 8-bit cache and dequantizes them: out[i] = code * scale of its slot, zeros at slot -1.

Reads one byte an element and a float32 scale a vector, and writes these in the wanted dtype, once; arithmetic in
float32. The inverse of `scatter_slots_quantized`.
"""

from __future__ import annotations

import torch

from ._checks import FLOATS, bad_argument, lowest_entry, on_host
from ._copy import cpu
from ._copy.quantize import check_quantized, dequantize_rows, launch_gather_dequantized
from ._library import operator
from .gather_blocks import gather_blocks


def _gather_cpu(
    cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor, dtype: torch.dtype, lowest: int
) -> torch.Tensor:
    """What `pc.gather_slots_dequantized` gives, in PyTorch on CPU tensors."""
    codes = torch.empty((slot_mapping.shape[0], *cache.shape[2:]), dtype=cache.dtype)
    row_scales = torch.empty(slot_mapping.shape[0])
    cpu.gather_rows(cache, 2, slot_mapping, codes, lowest)
    cpu.gather_rows(scales, 2, slot_mapping, row_scales, lowest)
    return dequantize_rows(codes, row_scales, dtype)


def _run(cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    check_quantized(cache, scales, slot_mapping)
    if dtype not in FLOATS:
        raise bad_argument("dtype", dtype, "float16, bfloat16 or float32", TypeError)
    lowest = lowest_entry("slot_mapping", slot_mapping, scales.numel())
    if on_host(cache, slot_mapping):
        return _gather_cpu(cache, scales, slot_mapping, dtype, lowest)
    device = slot_mapping.device if slot_mapping.is_cuda else cache.device
    out = cpu.empty((slot_mapping.shape[0], *cache.shape[2:]), dtype, device)
    if out.numel():
        slots = slot_mapping.to(device, non_blocking=True).contiguous()
        launch_gather_dequantized(cache, scales, slots, out.view(out.shape[0], -1))
    return out


@operator(cpu=_run, launch=_run, docs_from=(gather_blocks,))
def gather_slots_dequantized(
    cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Gathers token vectors that `pc.scatter_slots_quantized` stored.

    Args:
        cache: `[num_blocks, block_size, *features]`, float8_e4m3fn or int8 with contiguous features; in host memory it
            is to be pinned when slot_mapping is on a device.
        scales: `[num_blocks, block_size]` float32 on the cache's device.
        slot_mapping: `[num_tokens]` int64 or int32, block number * block_size + offset; -1 gives zeros.
        dtype: float16, bfloat16 or float32, of the result.

    Returns:
        `[num_tokens, *features]`, contiguous, `dtype`, where slot_mapping is if that is a device, else where the
        cache is.

    Examples:
        >>> row = torch.tensor([[0.5, -1.0, 2.0, 127.0]])
        >>> cache, scales = torch.zeros(4, 2, 4, dtype=torch.int8), torch.zeros(4, 2)
        >>> pc.scatter_slots_quantized(row, cache, scales, torch.tensor([5]))
        >>> pc.gather_slots_dequantized(cache, scales, torch.tensor([5, -1]), torch.float32)
        tensor([[  0.,  -1.,   2., 127.],
                [  0.,   0.,   0.,   0.]])
    """
    device = slot_mapping.device if slot_mapping.is_cuda else cache.device
    return cache.new_empty((slot_mapping.shape[0], *cache.shape[2:]), dtype=dtype, device=device)
