"""pc.attention_plan: what a step pays once for all its layers. It has no rival; the attention over it is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import pc

from ..harness.registry import OURS, Benchmark, Case, Provider
from .attention import AttentionCall, AttentionCase, AttentionInputs

K = 1024


class PlanInputs(AttentionInputs):
    """Inputs of attention, of which only tables and lengths are read."""

    def __init__(self, case: AttentionCase, device: torch.device, rotate: int) -> None:
        super().__init__(case, device, 0)
        tables = self.calls[0].block_tables
        self.bytes, self.flops = 4 * tables.numel() + 8 * sum(-(-length // 64) for length in case.seq_lens), 0

    def check(self, call: AttentionCall, run: Callable[[], Any]) -> float:
        """The attention that uses the plan, against float64."""
        return super().check(call, lambda: pc.paged_attention(**call.arguments("paged_attention"), plan=run()))


def _prepare(call: AttentionCall) -> Callable[[], torch.Tensor]:
    given = (call.block_tables, call.seq_lens, call.query_start_loc, call.case.block_size)
    return lambda: pc.attention_plan(*given, num_kv_heads=call.case.heads[1])


def _case(name: str, device: str, seq_lens: tuple[int, ...]) -> Case:
    # One small head: the cache is not what is measured.
    case = AttentionCase(seq_lens, (1,) * len(seq_lens), heads=(1, 1), head_dim=16)
    columns = {key: value for key, value in case.conditions().items() if key in ("sequences", "seq_lens", "block_size")}
    return dataclasses.replace(
        Case(name, lambda where, rotate: PlanInputs(case, where, rotate), True, device), conditions=columns
    )


SIZES = {"8x4k": (4 * K,) * 8, "128x2k": (2 * K,) * 128, "1x128k + 31x1k": (128 * K, *(K,) * 31)}
BENCHMARKS = (
    Benchmark(
        "attention_plan",
        tuple(_case(name, device, lens) for device in ("cpu", "cuda") for name, lens in SIZES.items()),
        (Provider(OURS, _prepare, lambda: pc.__version__),),
    ),
)
