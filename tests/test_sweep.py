"""Sweeps of attention's constants: each candidate launches what its name says, and nothing remembers it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.harness.registry import OURS, Benchmark
from benchmarks.kernels import sweep
from pc.triton_ops._attention import build


def launches(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the launch that each candidate builds for the first case, by the candidate's name."""
    built: list[Any] = []
    make = build.build_attention
    monkeypatch.setattr(build, "build_attention", lambda args: built.append(make(args)) or built[-1])
    call = benchmark.of("cpu", True)[0].build(torch.device("cpu"), 0).calls[0]
    names = [provider.name for provider in benchmark.providers if provider.name != OURS]
    for provider in benchmark.providers[1:]:
        provider.prepare(call)
    return dict(zip(names, built, strict=True))


def test_a_decode_is_launched_as_its_candidate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = sweep.BENCHMARKS[0]
    found = launches(decode, monkeypatch)
    for name, launch in found.items():
        if "warps" in name:
            keys, warps, stages = (int(part.split("x")[-1].split()[0]) for part in name.split(", ")[:3])
            options = launch.decode.options
            assert (launch.decode.constants["BLOCK_N"], options["num_warps"], options["num_stages"]) == (
                keys,
                warps,
                stages,
            )
    assert found["8 programs a processor"].target_items == 2 * found["4 programs a processor"].target_items
    assert build.programs_per_processor("interpreter") == 4, "the constants in use are back"
    assert {int(name.split()[-4]) for name in found if "warps" in name} == set(sweep.STAGES)


def test_a_prefill_is_launched_as_its_candidate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches(sweep.BENCHMARKS[1], monkeypatch)
    shapes = {
        (launch.prefill.constants["BLOCK_M"], launch.prefill.constants["BLOCK_N"], launch.prefill.options["num_warps"])
        for launch in found.values()
    }
    assert shapes == set(sweep.PREFILL_SHAPES)
    assert len(found) == 2 * len(sweep.STAGES) * len(sweep.PREFILL_SHAPES)


def test_the_cases_of_head_dim_128_come_first() -> None:
    for benchmark in sweep.BENCHMARKS:
        assert benchmark.providers[0].name == OURS
        heads = [case.conditions["head_dim"] for case in benchmark.of("cuda", False)]
        assert heads == ["128", "128", "64", "64", "256", "256"]
