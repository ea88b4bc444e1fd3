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


@pytest.mark.parametrize(("num_keys", "most"), [(512, 300), (2048, 450)], ids=["2 splits", "8 splits"])
def test_the_sum_of_few_splits_takes_few_instructions(num_keys, most):
    """Whatever else warmup compiles it for: a sum of 128 splits at once took 6,256 instructions a row and head."""
    heads, first = 4, len(Session.launches)
    query, cache = torch.randn(1, heads, 128).bfloat16(), torch.randn(num_keys // 16, 16, 2, 128).bfloat16()
    tables = torch.arange(num_keys // 16, dtype=torch.int32)[None]
    lens, starts = torch.tensor([num_keys], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    pc.paged_attention(query, cache, cache, tables, lens, starts, 0.1, max_query_len=1)
    sums = [n.instructions for n in Session.launches[first:] if n.program.name == "_merge_splits_kernel"]
    assert len(sums) == 1
    assert sums[0] / heads <= most
