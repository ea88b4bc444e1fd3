"""pc.warmup compiles what serving will launch."""

from __future__ import annotations

import subprocess

import pytest
import torch

import pc
from benchmarks.harness.tables import RESULTS, read_rows
from pc.triton_ops._core.runtime import HAS_TRITON, INTERPRET


@pytest.mark.slow  # `test_numbers` has the first row
@pytest.mark.skipif(not HAS_TRITON or torch.version.hip is not None, reason="chooses kernels for CUDA")
@pytest.mark.skipif(INTERPRET, reason="compiles, in a process of its own")
@pytest.mark.parametrize("row", read_rows(RESULTS / "life.csv")[1:], ids=lambda row: row["layer"])
def test_a_life_of_a_model_compiles_nothing_after_it(row, tmp_path):
    """Prefill, chunks, decodes at 1 to 128k tokens and mixes of them run for each kind of layer in the tree's rows."""
    from benchmarks.kernels.launches import run_on_cpu

    run_on_cpu("-m", "benchmarks", "life", row["layer"], "--output", str(tmp_path / "life.csv"))
    (found,) = read_rows(tmp_path / "life.csv")
    assert found["missing"] == ""
    assert found["kernels"] == row["kernels"], "run: python -m benchmarks life"


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"window": 5, "sinks": True, "alibi": True, "softcap": 2.0}, marks=pytest.mark.slow),
        pytest.param({"cache_dtype": torch.int8, "gaps": True}, marks=pytest.mark.slow),
    ],
)
def test_runs_every_regime(options, device):
    pc.warmup(4, 2, 32, dtype=torch.float32, device=device, **options)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="starts processes of its own")
def test_processes_take_a_share_each(monkeypatch):
    started, start = [], subprocess.Popen
    monkeypatch.delenv("PC_KERNELS_ON_CPU", raising=False)  # of the emulator, which processes of their own are without
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **given: started.append(start(*args, **given)) or started[-1]
    )
    pc.warmup(4, 2, 32, dtype=torch.float32, cache_dtype=torch.int8, window=8, device="cpu", workers=2)
    assert [process.returncode for process in started] == [0, 0]


@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "head_dim", "block_size", "workers"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name}: got 0, needs at least 1"):
        pc.warmup(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "device": "cpu", name: 0})


@pytest.mark.gpu
def test_serving_compiles_nothing_more(device):
    from triton import knobs

    compiled: list[str] = []
    pc.warmup(8, 2, 64, dtype=torch.bfloat16, device=device)
    cache = torch.randn(100, 16, 2, 64, dtype=torch.bfloat16, device=device)
    tables = torch.arange(60, dtype=torch.int32, device=device).view(2, 30)
    knobs.runtime.jit_cache_hook = lambda *, repr, **rest: compiled.append(repr)
    try:
        for lens, queries in (((400, 17), (1, 1)), ((400, 300), (9, 300)), ((480, 30), (1, 30)), ((77, 80), (5, 5))):
            query = torch.randn(sum(queries), 8, 64, dtype=torch.bfloat16, device=device)
            starts = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32, device=device)
            given = (tables, torch.tensor(lens, dtype=torch.int32, device=device), starts)
            pc.paged_attention(query, cache, cache, *given, 0.125, max_query_len=max(queries))
    finally:
        knobs.runtime.jit_cache_hook = None
    assert not compiled
