"""`pytest benchmarks/`: every quick case of every provider under pytest-benchmark; numbers are checked first."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from pc.bench import PACKAGE, load_benchmarks

load_benchmarks()
registry = importlib.import_module(f"{PACKAGE}.harness.registry")
KIND = "cuda" if torch.cuda.is_available() else "cpu"
if KIND == "cpu":
    torch.set_num_threads(1)  # as python -m pc bench does
BENCHMARKS = registry.discover()
CASES = [
    pytest.param(case, provider, id=f"{benchmark.op}-{case.name}-{provider.name}")
    for benchmark in BENCHMARKS
    for case in benchmark.of(KIND, True)
    for provider in benchmark.providers
    if provider.device in (None, KIND)
]


@pytest.mark.parametrize(("case", "provider"), CASES)
def test_operator(case: Any, provider: Any, benchmark: Any) -> None:
    try:
        provider.version()
    except ImportError as error:
        pytest.skip(str(error))
    inputs = case.build(torch.device(KIND), 0)
    try:
        runs = [provider.prepare(call) for call in inputs.calls]
    except registry.UnsupportedError as error:
        pytest.skip(str(error))
    inputs.check(inputs.calls[-1], runs[-1])

    def once() -> None:
        for run in runs:
            run()
        if KIND == "cuda":
            torch.cuda.synchronize()

    benchmark.extra_info["calls"] = len(runs)
    benchmark(once)
