"""Inputs of benchmarks of rows that are stored with a scale each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pc

from ..harness.registry import Case, WrongError
from .rows import BLOCK_SIZE

MATRIX = (
    ("cpu", 1024, (1024,), torch.float32, "int8", True),
    ("cpu", 1024, (1024,), torch.float32, "float8_e4m3fn", False),
    ("cuda", 16384, (4096,), torch.bfloat16, "int8", False),
    ("cuda", 16384, (4096,), torch.bfloat16, "float8_e4m3fn", True),
)


@dataclass(frozen=True)
class QuantizedCall:
    """Tensors of one call, named as the operators name them; `source` is also what a gather should nearly give."""

    cache: torch.Tensor
    scales: torch.Tensor
    slot_mapping: torch.Tensor
    source: torch.Tensor


class QuantizedInputs:
    """Calls on disjoint slots of one cache, which holds the quantized sources already."""

    flops = 0

    def __init__(
        self, count: int, features: tuple[int, ...], dtype: torch.dtype, stored: str, device: torch.device, rotate: int
    ) -> None:
        size = torch.Size(features).numel()
        code: torch.dtype = getattr(torch, stored)
        self.bytes = count * (size * (dtype.itemsize + code.itemsize) + 4 + 8)
        copies = max(2, min(16, -(-rotate // self.bytes)))
        blocks = -(-count // BLOCK_SIZE) * copies
        cache = torch.zeros(blocks, BLOCK_SIZE, *features, device=device).to(code)
        scales = torch.zeros(blocks, BLOCK_SIZE, device=device)
        order = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(0)).to(device)
        generator = torch.Generator(device).manual_seed(0)
        self.calls = []
        for i in range(copies):
            source = torch.randn(count, *features, generator=generator, device=device).to(dtype)
            call = QuantizedCall(cache, scales, order[i * count : (i + 1) * count], source)
            pc.scatter_slots_quantized(call.source, cache, scales, call.slot_mapping)
            self.calls.append(call)

    def check(self, call: QuantizedCall, run: Callable[[], Any]) -> float:
        """What is read back differs from the row by half a step at most: amax / 254 for int8, a 16th for float8."""
        got = run()
        read = dequantized(call) if got is None else got
        source, amax = call.source.double(), call.source.double().abs().amax(dim=1, keepdim=True)
        if call.cache.dtype == torch.int8:
            allowed = amax / 254 * 1.01
        else:
            allowed = torch.maximum(source.abs() / 16, amax / 2**19) * 1.01
        allowed = allowed + source.abs() * torch.finfo(call.source.dtype).eps
        error = (read.double() - source).abs()
        if bool((error > allowed).any()) or bool(error.isnan().any()):
            raise WrongError(f"off by {(error / allowed).max():.3g} times what is allowed")
        return float(error.max())


def dequantized(call: QuantizedCall) -> torch.Tensor:
    """The rows as PyTorch reads them: codes gathered, converted and multiplied."""
    codes = call.cache.flatten(0, 1).view(torch.uint8)[call.slot_mapping].view(call.cache.dtype)
    scale = call.scales.flatten()[call.slot_mapping]
    return (codes.float() * scale[:, None]).to(call.source.dtype)


def quantize_and_write(call: QuantizedCall) -> None:
    """The same in PyTorch: a scale per row, codes, and two indexed assignments."""
    largest = 127.0 if call.cache.dtype == torch.int8 else 448.0
    source = call.source.float()
    scale = (source.abs().amax(dim=1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    codes = source / scale[:, None]
    codes = (codes.round() if call.cache.dtype == torch.int8 else codes).clamp(-largest, largest).to(call.cache.dtype)
    call.cache.flatten(0, 1).view(torch.uint8)[call.slot_mapping] = codes.view(torch.uint8)
    call.scales.flatten()[call.slot_mapping] = scale


def quantized_cases() -> tuple[Case, ...]:
    """int8 and float8, one size each."""
    cases = []
    for device, count, features, dtype, stored, quick in MATRIX:

        def build(
            where: torch.device, rotate: int, given: tuple[Any, ...] = (count, features, dtype, stored)
        ) -> QuantizedInputs:
            return QuantizedInputs(*given, where, rotate)

        name = f"{count} slots, hidden {features[0]} {str(dtype).removeprefix('torch.')} as {stored}"
        conditions = {"count": str(count), "block_size": str(BLOCK_SIZE), "features": str(features[0]), "cache": stored}
        cases.append(Case(name, build, quick, device, conditions))
    return tuple(cases)
