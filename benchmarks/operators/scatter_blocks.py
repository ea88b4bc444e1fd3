"""pc.scatter_blocks against indexed assignment and a copy per block."""

from __future__ import annotations

import pc

from ..harness.registry import Benchmark
from .rows import RowsCall, row_cases, row_providers, written


def _indexing(call: RowsCall) -> None:
    call.cache[call.index] = call.source


def _index_copy(call: RowsCall) -> None:
    call.cache.index_copy_(0, call.index, call.source)


def _loop(call: RowsCall) -> None:
    for i, block in enumerate(call.index.tolist()):
        call.cache[block].copy_(call.source[i])


BENCHMARK = Benchmark(
    "scatter_blocks",
    row_cases("block", lambda call, before: written(before, call.index, call.source)),
    row_providers(
        lambda call: pc.scatter_blocks(call.source, call.cache, call.index),
        indexing=_indexing,
        index_copy_=_index_copy,
        **{"copy per block": _loop},  # as caches do that keep a tensor per chunk
    ),
)
