"""Quantizes token rows to 8 bits and scatters them: scale = max(|row|) / limit, code = round(row / scale).

The limit is 448 for float8_e4m3fn and 127 for int8. Reads the bytes of num_tokens rows once (rows above 2048 elements
twice, the second time from the processor's cache) and writes one byte an element and a float32 scale a row; arithmetic
in float32.
"""

from __future__ import annotations

import torch

from ._checks import FLOATS, bad_argument, check_reachable, check_tensor, describe, lowest_entry, on_host
from ._copy import cpu
from ._copy.quantize import check_quantized, launch_scatter_quantized, quantize_rows
from ._library import operator
from .scatter_slots import scatter_slots


def scatter_slots_quantized_cpu(
    source: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """What `pc.scatter_slots_quantized` writes, in PyTorch on CPU tensors."""
    codes, row_scales = quantize_rows(source, cache.dtype)
    lowest = int(slot_mapping.amin()) if slot_mapping.numel() else 0
    cpu.scatter_rows(codes, cache, 2, slot_mapping, lowest)
    cpu.scatter_rows(row_scales, scales, 2, slot_mapping, lowest)


def _run(source: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    check_quantized(cache, scales, slot_mapping)
    needs = [slot_mapping.shape[0], *cache.shape[2:]]
    check_tensor("source", source, len(needs), str(needs), FLOATS)
    if list(source.shape) != needs:
        raise bad_argument("source", describe(source), str(needs))
    check_reachable("source", source, slot_mapping, "slot_mapping")
    lowest_entry("slot_mapping", slot_mapping, scales.numel())
    if not source.numel():
        return
    if on_host(source, cache, slot_mapping):
        scatter_slots_quantized_cpu(source, cache, scales, slot_mapping)
        return
    device = next((t.device for t in (slot_mapping, source, cache) if t.is_cuda), source.device)
    slots = slot_mapping.to(device, non_blocking=True).contiguous()
    rows = source.reshape(source.shape[0], -1)
    launch_scatter_quantized(rows if rows.stride(1) == 1 else rows.contiguous(), cache, scales, slots)


@operator(cpu=_run, launch=_run, mutates=("cache", "scales"), docs_from=(scatter_slots,))
def scatter_slots_quantized(
    source: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Quantizes the rows of tokens, each with a scale of its own, and writes them to their slots.

    What is read back differs from the row by at most half a step: its largest absolute value / 254 for int8, and for
    float8_e4m3fn a 16th of the element's own size, or its largest absolute value / 2^19 where that is more. A row of
    zeros stays zero; a row that holds NaN or infinity reads as NaN. A slot that appears twice is undefined.

    Args:
        source: `[num_tokens, *features]`, float16, bfloat16 or float32.
        cache: `[num_blocks, block_size, *features]`, float8_e4m3fn or int8 with contiguous features, written to.
        scales: `[num_blocks, block_size]` float32 on the cache's device, written to.

    Examples:
        >>> cache, scales = torch.zeros(4, 2, 4, dtype=torch.int8), torch.zeros(4, 2)  # 4 blocks of 2 slots
        >>> row = torch.tensor([[0.5, -1.0, 2.0, 127.0]])
        >>> pc.scatter_slots_quantized(row, cache, scales, torch.tensor([5]))
        >>> cache[2, 1], scales[2, 1]
        (tensor([  0,  -1,   2, 127], dtype=torch.int8), tensor(1.))
    """
