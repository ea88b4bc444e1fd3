"""pc.gather_blocks against indexing and a copy per block."""

from __future__ import annotations

import torch

import pc

from ..harness.registry import Benchmark
from .rows import RowsCall, row_cases, row_providers


def _loop(call: RowsCall) -> torch.Tensor:
    out = torch.empty_like(call.source)
    for i, block in enumerate(call.index.tolist()):
        out[i].copy_(call.cache[block])
    return out


BENCHMARK = Benchmark(
    "gather_blocks",
    row_cases("block", lambda call, before: before[call.index]),
    row_providers(
        lambda call: pc.gather_blocks(call.cache, call.index),
        indexing=lambda call: call.cache[call.index],
        index_select=lambda call: call.cache.index_select(0, call.index),
        **{"copy per block": _loop},  # as caches do that keep a tensor per chunk
    ),
)
