"""pc.gather_slots against indexing of a flattened cache."""

from __future__ import annotations

import pc

from ..harness.registry import Benchmark
from .rows import flat, row_cases, row_providers

BENCHMARK = Benchmark(
    "gather_slots",
    row_cases("slot", lambda call, before: flat(before)[call.index]),
    row_providers(
        lambda call: pc.gather_slots(call.cache, call.index),
        indexing=lambda call: flat(call.cache)[call.index],
        index_select=lambda call: flat(call.cache).index_select(0, call.index),
    ),
)
