"""Single queries over blocks per KV head on CPU tensors, whose keys and values are read where they lie."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
from attention_cases import Case, build, check

import pc
from pc.triton_ops._attention import cpu_in_place, cpu_rows, cpu_steps
from pc.triton_ops._attention.call import AttentionCall
from pc.triton_ops._attention.cpu_cache import Cache, Matrix
from pc.triton_ops._attention.operator import attention_cpu

NAMES = tuple(inspect.signature(pc.sparse_gap_attention).parameters)


def _call(batch):
    case = batch.case
    arguments = (*batch.tensors, batch.positions, batch.scale, case.window, case.num_sink_tokens)
    return AttentionCall.of(NAMES, arguments, batch.options)


@pytest.fixture
def _no_copies(monkeypatch):
    def refused(*_):
        raise AssertionError("keys are copied")

    for name in ("read", "read_rows", "rows_at"):
        monkeypatch.setattr(Cache, name, refused)
    monkeypatch.setattr(cpu_steps, "_GATHER_BYTES", 0)


CASES = [
    Case(lens=(640,), queries=(1,), head_tables=True, holes=0.5),
    Case(lens=(513, 40, 16, 300), queries=(1, 1, 1, 1), head_tables=True, holes=0.5, sinks=True),
    Case(lens=(513, 40, 16), queries=(1, 1, 1), head_tables=True, holes=0.95, head_major=True),
    Case(lens=(513, 0, 40), queries=(1, 0, 1), head_tables=True, holes=0.5, padding=3),
    Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5, scattered=True),
    Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5, scattered=True, causal=False),
    Case(lens=(513, 200), queries=(1, 1), head_tables=True, holes=0.3, window=100, num_sink_tokens=20),
    Case(lens=(333, 200), queries=(1, 1), heads=(8, 1), head_dim=80, block_size=5, head_tables=True, value_dim=48),
    Case(lens=(513, 200), queries=(1, 1), heads=(3, 3), top_k=5),
    Case(lens=(513, 200), queries=(1, 1), top_k=9, head_tables=True, holes=0.5),
    Case(lens=(513, 200), queries=(1, 1), top_k=3, scattered=True),
    Case(lens=(200, 40), queries=(0, 1), padding=1, head_tables=True, holes=0.5),
    Case(lens=(90, 60), queries=(40, 20), top_k=3, window=50, padding=2),
]


@pytest.mark.usefixtures("_no_copies")
@pytest.mark.parametrize("limits", [(256, 1 << 18), (24, 1 << 18), (24, 200)], ids=["whole", "parts", "few"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numerics_without_copies(case, limits, monkeypatch):
    """Rows whole, in parts, and few at once; NaN lies in all that no query of a head attends to."""
    for name, limit in zip(("_PART_KEYS", "_MAX_SCORES"), limits, strict=True):
        monkeypatch.setattr(cpu_in_place, name, limit)
    batch = build(case)
    check(build(case), *attention_cpu(_call(batch)))


@pytest.mark.parametrize("place", ["halves", "pairs", "offset", "columns", "padded", "mixed"])
def test_layouts(place, monkeypatch):
    """Keys and values are read in place in parts of one tensor too; not where rows have gaps or lie differently."""
    monkeypatch.setattr(cpu_steps, "_GATHER_BYTES", 0)
    batch = build(Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5))
    key, value = batch.key_cache, batch.value_cache
    if place == "halves":
        batch.key_cache, batch.value_cache = torch.stack([key, value])
    elif place == "pairs":
        batch.key_cache, batch.value_cache = torch.stack([key, value], 1).unbind(1)
    elif place == "offset":
        batch.key_cache, batch.value_cache = (torch.cat([x[:1], x])[1:] for x in (key, value))
    elif place == "mixed":
        batch.value_cache = value.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        wide = torch.cat([key, value, key], 3)[..., : 128 + 3 * (place == "padded")].contiguous()
        batch.key_cache, batch.value_cache = wide[..., :64], wide[..., 64:128]
    call = _call(batch)
    matrix = Cache(call.key_cache, call.value_cache, None, None, torch.float32).matrix
    assert (matrix is None) == (place == "mixed")
    assert (matrix is not None and matrix.is_computed_with) == (place not in ("padded", "mixed"))
    if matrix is not None:
        assert matrix.keys.untyped_storage().data_ptr() == batch.key_cache.untyped_storage().data_ptr()
    check(build(batch.case), *attention_cpu(call))


def test_as_many_queries_as_sequences():
    """Two of one sequence and none of another are no step of one query each."""
    batch = build(Case(lens=(90, 60), queries=(2, 0), head_tables=True, holes=0.5))
    check(build(batch.case), *attention_cpu(_call(batch)))


def test_rows_of_large_caches():
    """Past 2**31 rows their numbers need 64 bits."""
    for rows, dtype in ((1 << 31, np.int32), ((1 << 31) + 1, np.int64)):
        keys = torch.empty((rows, 1), device="meta")
        cells = Matrix(keys, keys, 128, 8, 1).cells(np.array([(1 << 24) - 1, 0], np.int32), np.array([7, 2]), 16)
        assert cells.dtype == dtype
        assert cells[:, [0, -1]].tolist() == [[(1 << 31) - 128 + 7, (1 << 31) - 1], [2, 122]]


@pytest.mark.parametrize("setting", ["float64 by default", "deterministic", "inference", "two threads"])
def test_settings(setting):
    batch = build(Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5))
    call, threads = _call(batch), torch.get_num_threads()
    try:
        torch.set_default_dtype(torch.float64 if setting == "float64 by default" else torch.float32)
        torch.use_deterministic_algorithms(setting == "deterministic")
        torch.set_num_threads(2 if setting == "two threads" else threads)
        with torch.inference_mode(setting == "inference"):
            out, lse = attention_cpu(call)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    check(build(batch.case), out, lse)


def test_nothing_is_said_about_sparse_tensors():
    """PyTorch warns once a process that they may change; that is not the caller's to know."""
    program = (
        "import pc, torch; one = lambda *n: torch.tensor(n, dtype=torch.int32); cache = torch.randn(8, 16, 2, 64);"
        "pc.sparse_gap_attention(torch.randn(1, 4, 64), cache, cache, one(-1, 5, 2, 7, -1, 2).view(1, 2, 3), one(48),"
        "one(0, 1), None, 0.125)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    "case",
    [
        Case(lens=(513, 200), queries=(1, 1), heads=(12, 1), head_tables=True, holes=0.5),
        Case(lens=(513, 200), queries=(1, 1), dtype=torch.bfloat16, head_tables=True, holes=0.5),
        Case(lens=(513, 200), queries=(40, 30), head_tables=True, holes=0.5),
        Case(lens=(513, 200), queries=(40, 30), head_tables=True, holes=0.5, causal=False, head_major=True),
    ],
    ids=str,
)
def test_what_is_gathered_in_parts(case, monkeypatch):
    """Large groups, half precision and runs: each row's keys in several gathers, summed before all are there."""
    parts = []
    flash, own = cpu_rows._flash, (3 * 16 * 64 * 4, 2 << 10)
    for name, limit in zip(("_GATHER_BYTES", "_PENDING_BYTES"), own, strict=True):
        monkeypatch.setattr(cpu_rows, name, limit)
    monkeypatch.setattr(cpu_rows, "GATHER_BYTES", own[0])
    monkeypatch.setattr(cpu_rows, "_PADDING_BYTES", 0)
    monkeypatch.setattr(cpu_rows, "_flash", lambda *given: parts.append(given) or flash(*given))
    batch = build(case)
    check(build(case), *attention_cpu(_call(batch)))
    assert len(parts) > 4
