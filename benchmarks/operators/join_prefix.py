"""pc.join_prefix against indexing: cached rows gathered, new rows put between them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import pc

from ..harness.inputs import Call, Draw, Expected, Inputs, default_dtype, paged_batch, shuffled
from ..harness.registry import Benchmark, Case, case, in_torch, ours


def join_inputs(batch: int, cached: int, fresh: int, features: int, device: torch.device, rotate: int) -> Inputs:
    """Return equal sequences over disjoint shuffled blocks of one cache, and the maps that indexing needs."""
    length, dtype = cached + fresh, default_dtype(device)
    row, blocks = features * dtype.itemsize, batch * -(-length // 16)

    def calls(draw: Draw, copies: int) -> Iterable[Call]:
        cache = draw(copies * blocks, 16, features).to(dtype)
        at = torch.arange(batch * length, device=device).view(batch, length)
        for own in shuffled(copies * blocks, torch.device("cpu")).split(blocks):
            made = paged_batch((length,) * batch, (fresh,) * batch, 16, own)
            tables, lens, starts = (part.to(device) for part in made)
            slots = tables.repeat_interleave(16, dim=1)[:, :cached] * 16 + torch.arange(cached, device=device) % 16
            yield Call(
                cache=cache,
                block_tables=tables,
                seq_lens=lens,
                new=draw(batch * fresh, features).to(dtype),
                query_start_loc=starts,
                num_rows=batch * length,
                maps=(slots.flatten(), at[:, :cached].flatten(), at[:, cached:].flatten()),
            )

    def reference(call: Call) -> Iterable[Expected]:
        return [Expected(_indexing(call), lambda got: got)]

    return Inputs(calls, reference, 2 * batch * length * row, 0, device, rotate, blocks * 16 * row)


def _indexing(call: Call) -> torch.Tensor:
    slots, cached_rows, new_rows = call.maps
    out = call.new.new_empty(call.num_rows, call.new.shape[1])
    out[cached_rows] = call.cache.flatten(0, 1)[slots]
    out[new_rows] = call.new
    return out


def _ours(call: Call) -> torch.Tensor:
    return pc.join_prefix(call.cache, call.block_tables, call.seq_lens, call.new, call.query_start_loc, call.num_rows)


def _case(device: str, batch: int, cached: int, fresh: int, features: int, quick: bool = False) -> Case:
    name = f"{batch}x {cached} cached + {fresh} new, hidden {features}"
    columns = {"sequences": batch, "cached": cached, "new": fresh, "features": features}
    return case(name, device, quick, join_inputs, batch, cached, fresh, features, **columns)


BENCHMARKS = (
    Benchmark(
        "join_prefix",
        (
            _case("cpu", 1, 4096, 256, 1024, quick=True),
            _case("cpu", 8, 512, 64, 1024, quick=True),
            _case("cuda", 1, 8192, 256, 4096),
            _case("cuda", 32, 2048, 64, 4096, quick=True),
        ),
        (ours("join_prefix", _ours), in_torch("torch indexing", _indexing)),
    ),
)
