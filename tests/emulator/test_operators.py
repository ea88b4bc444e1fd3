"""Every operator's compiled kernels, in calls whose masks end at every element of a tile."""

from __future__ import annotations

import pytest
import torch

import pc
from emulator.cases import CASES, QUICK, run
from emulator.launch import Session


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_compiled(name):
    run(name)


@pytest.mark.parametrize(("split_keys", "window"), [(8192, 0), (64, 0), (64, 100)])
def test_batch_invariant(split_keys, window, monkeypatch):
    """A row has the same bits as in a whole prompt: in chunks, decoded, beside others, split, with a plan."""
    from pc.triton_ops._attention import build

    monkeypatch.setattr(build, "INVARIANT_SPLIT_KEYS", split_keys)
    torch.manual_seed(0)
    lens, heads = torch.tensor([150, 70], dtype=torch.int32), 2
    query, cache = torch.randn(151, heads, 64).half(), torch.randn(2, 16, 16, 1, 64).half()
    tables = torch.stack([torch.arange(10), torch.arange(10) % 5 + 10]).to(torch.int32)
    options = {"batch_invariant": True}

    def attend(rows, tables, lens, starts, plan=None):
        bounds = torch.tensor(starts, dtype=torch.int32)
        plan = plan and pc.attention_plan(tables, lens, bounds, 16, num_kv_heads=1, window=window, **options)
        call = (rows, *cache, tables, lens, bounds, 0.125)
        if window:
            return pc.sliding_window_attention(*call, window, plan=plan, **options)
        return pc.paged_attention(*call, plan=plan, **options)

    whole = attend(query, tables, lens, [0, 150, 151])
    assert torch.equal(attend(query, tables, lens, [0, 150, 151], plan=True), whole)
    for begin, end in ((0, 64), (64, 128), (128, 150), (149, 150), (128, 129)):
        own = torch.tensor([end], dtype=torch.int32)
        assert torch.equal(attend(query[begin:end], tables[:1], own, [0, end - begin]), whole[begin:end]), begin
    assert torch.equal(attend(query[149:], tables, lens, [0, 1, 2], plan=True), whole[149:])


@pytest.mark.parametrize(("num_keys", "most"), [(512, 300), (2048, 450)], ids=["2 splits", "8 splits"])
def test_the_sum_of_few_splits_takes_few_instructions(num_keys, most):
    """Warmup compiles it for other numbers too; a sum of 128 splits at once took 6,256 instructions a row and head."""
    heads, first = 4, len(Session.launches)
    query, cache = torch.randn(1, heads, 128).bfloat16(), torch.randn(num_keys // 16, 16, 2, 128).bfloat16()
    tables = torch.arange(num_keys // 16, dtype=torch.int32)[None]
    lens, starts = torch.tensor([num_keys], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    pc.paged_attention(query, cache, cache, tables, lens, starts, 0.1, max_query_len=1)
    sums = [n.instructions for n in Session.launches[first:] if n.program.name == "_merge_splits_kernel"]
    assert len(sums) == 1
    assert sums[0] / heads <= most
