"""pc.scatter_slots against indexed assignment to a flattened cache."""

from __future__ import annotations

import pc

from ..harness.registry import Benchmark
from .rows import RowsCall, flat, row_cases, row_providers, written


def _indexing(call: RowsCall) -> None:
    flat(call.cache)[call.index] = call.source


def _index_copy(call: RowsCall) -> None:
    flat(call.cache).index_copy_(0, call.index, call.source)


BENCHMARK = Benchmark(
    "scatter_slots",
    row_cases("slot", lambda call, before: written(flat(before), call.index, call.source).view_as(before)),
    row_providers(
        lambda call: pc.scatter_slots(call.source, call.cache, call.index), indexing=_indexing, index_copy_=_index_copy
    ),
)
