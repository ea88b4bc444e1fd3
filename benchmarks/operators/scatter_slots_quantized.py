"""pc.scatter_slots_quantized against the same in PyTorch."""

from __future__ import annotations

import pc

from ..harness.registry import Benchmark
from .quantized import quantize_and_write, quantized_cases
from .rows import row_providers

BENCHMARK = Benchmark(
    "scatter_slots_quantized",
    quantized_cases(),
    row_providers(
        lambda call: pc.scatter_slots_quantized(call.source, call.cache, call.scales, call.slot_mapping),
        indexing=quantize_and_write,
    ),
)
