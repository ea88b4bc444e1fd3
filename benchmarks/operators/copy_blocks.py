"""pc.copy_blocks against indexed assignment from an indexed copy."""

from __future__ import annotations

import pc

from ..harness.registry import Benchmark
from .rows import RowsCall, row_cases, row_providers, written


def _indexing(call: RowsCall) -> None:
    call.cache[call.targets] = call.cache[call.index]


def _index_copy(call: RowsCall) -> None:
    call.cache.index_copy_(0, call.targets, call.cache.index_select(0, call.index))


BENCHMARK = Benchmark(
    "copy_blocks",
    row_cases("block", lambda call, before: written(before, call.targets, before[call.index])),
    row_providers(
        lambda call: pc.copy_blocks(call.cache, call.index, call.targets), indexing=_indexing, index_copy_=_index_copy
    ),
)
