"""pc.join_prefix against indexing: cached rows gathered, new rows put between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import pc

from ..harness.registry import OURS, Benchmark, Case, Provider, WrongError


@dataclass(frozen=True)
class JoinCall:
    """Tensors of one call, named as the operator names them, and the maps that indexing needs."""

    cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    new: torch.Tensor
    query_start_loc: torch.Tensor
    num_rows: int
    slots: torch.Tensor
    cached_rows: torch.Tensor
    new_rows: torch.Tensor


class JoinInputs:
    """Equal sequences over disjoint shuffled blocks of one cache."""

    flops = 0

    def __init__(
        self, batch: int, cached: int, fresh: int, features: int, dtype: torch.dtype, device: torch.device, rotate: int
    ) -> None:
        length, row = cached + fresh, features * dtype.itemsize
        self.bytes = 2 * batch * length * row
        blocks = batch * -(-length // 16)
        copies = max(2, min(16, -(-rotate // (blocks * 16 * row))))
        cache = torch.randn(copies * blocks, 16, features, device=device).to(dtype)
        order = torch.randperm(copies * blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        starts = torch.arange(batch + 1, dtype=torch.int32) * fresh
        at = np.arange(batch * length).reshape(batch, length)
        self.calls = []
        for i in range(copies):
            tables = order[i * blocks : (i + 1) * blocks].view(batch, -1)
            slots = tables.long().repeat_interleave(16, dim=1)[:, :cached] * 16 + torch.arange(cached) % 16
            self.calls.append(
                JoinCall(
                    cache,
                    tables.to(device),
                    torch.full((batch,), length, dtype=torch.int32, device=device),
                    torch.randn(batch * fresh, features, device=device).to(dtype),
                    starts.to(device),
                    batch * length,
                    slots.flatten().to(device),
                    torch.from_numpy(at[:, :cached].reshape(-1)).to(device),
                    torch.from_numpy(at[:, cached:].reshape(-1)).to(device),
                )
            )

    def check(self, call: JoinCall, run: Callable[[], Any]) -> float:
        """Bit for bit."""
        if not torch.equal(run(), _indexing(call)):
            raise WrongError("bits differ from those that indexing gives")
        return 0.0


def _indexing(call: JoinCall) -> torch.Tensor:
    out = call.new.new_empty(call.num_rows, call.new.shape[1])
    out[call.cached_rows] = call.cache.flatten(0, 1)[call.slots]
    out[call.new_rows] = call.new
    return out


def _ours(call: JoinCall) -> Callable[[], torch.Tensor]:
    given = (call.cache, call.block_tables, call.seq_lens, call.new, call.query_start_loc, call.num_rows)
    return lambda: pc.join_prefix(*given)


def _case(device: str, batch: int, cached: int, fresh: int, features: int, quick: bool = False) -> Case:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name = f"{batch}x {cached} cached + {fresh} new, hidden {features}"
    conditions = {"sequences": str(batch), "cached": str(cached), "new": str(fresh), "features": str(features)}

    def build(where: torch.device, rotate: int) -> JoinInputs:
        return JoinInputs(batch, cached, fresh, features, dtype, where, rotate)

    return Case(name, build, quick, device, conditions)


BENCHMARK = Benchmark(
    "join_prefix",
    (
        _case("cpu", 1, 4096, 256, 1024, quick=True),
        _case("cpu", 8, 512, 64, 1024, quick=True),
        _case("cuda", 1, 8192, 256, 4096),
        _case("cuda", 32, 2048, 64, 4096, quick=True),
    ),
    (
        Provider(OURS, _ours, lambda: pc.__version__),
        Provider("torch indexing", lambda call: lambda: _indexing(call), lambda: torch.__version__),
    ),
)
