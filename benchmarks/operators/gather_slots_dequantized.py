"""pc.gather_slots_dequantized against indexing, conversion and multiplication."""

from __future__ import annotations

import pc

from ..harness.registry import Benchmark
from .quantized import dequantized, quantized_cases
from .rows import row_providers

BENCHMARK = Benchmark(
    "gather_slots_dequantized",
    quantized_cases(),
    row_providers(
        lambda call: pc.gather_slots_dequantized(call.cache, call.scales, call.slot_mapping, call.source.dtype),
        indexing=dequantized,
    ),
)
