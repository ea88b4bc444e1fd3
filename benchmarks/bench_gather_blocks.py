"""pc.gather_blocks against indexing."""

from __future__ import annotations

import pc

from .registry import Benchmark
from .rows import row_cases, row_providers

BENCHMARK = Benchmark(
    "gather_blocks",
    row_cases("block", lambda call, before: before[call.index]),
    row_providers(
        lambda call: pc.gather_blocks(call.cache, call.index),
        indexing=lambda call: call.cache[call.index],
        index_select=lambda call: call.cache.index_select(0, call.index),
    ),
)
