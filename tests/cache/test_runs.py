"""Runs of slots, which give the same as single slots."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cache_cases import slots_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pc
from pc.cache.runs import slot_runs, slots_of_runs
from pc.triton_ops._copy.runs import _find_long_runs, find_runs

BLOCK = 4


@given(
    blocks=st.lists(st.integers(-1, 9), min_size=1, max_size=8),
    begin=st.integers(0, BLOCK - 1),
    left=st.integers(0, BLOCK - 1),
)
@settings(max_examples=300, deadline=None)
def test_runs_of_blocks(blocks, begin, left):
    count = len(blocks) * BLOCK - begin - left
    if count < 1:
        return
    want = [block * BLOCK + i if block >= 0 else -1 for block in blocks for i in range(BLOCK)]
    runs = slot_runs(np.array(blocks, np.int32), BLOCK, begin, count)
    assert slots_of(runs, count) == want[begin : begin + count] == slots_of_runs(runs, count).tolist()
    assert all(a[2] != b[1] or a[0] + a[2] - a[1] != b[0] for a, b in itertools.pairwise(runs))


@example([0, 2, 2, 3])
@example([-1, 0, 1, 2])
@given(st.lists(st.integers(-2, 6), max_size=12))
@settings(max_examples=200, deadline=None)
def test_runs_are_the_numbers_and_as_long_as_they_can_be(values):
    found = find_runs(np.array(values, np.int32))
    assert _find_long_runs(np.array(values or [-1], np.int32)) == found == find_runs(values)
    inside = {begin + i: first + i for begin, first, end in found for i in range(end - first)}
    assert inside == {i: value for i, value in enumerate(values) if value >= 0}
    assert all(a[2] != b[1] or a[0] + a[2] - a[1] != b[0] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("present", [1.0, 0.7])
def test_many_runs_give_their_slots(present):
    rng = np.random.default_rng(0)
    blocks = np.where(rng.random(1000) < present, rng.permutation(1000) // 3 * 3, -1)
    want = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    want[np.repeat(blocks < 0, BLOCK)] = -1
    runs = slot_runs(blocks, BLOCK, 0, want.size)
    assert len(runs) > 300
    assert slots_of_runs(runs, want.size).tolist() == want.tolist()


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("spans", [[(4, 8), (14, 20)], [(9, 10)], [(8, 9), (12, 18), (19, 20)]])
def test_runs_of_an_allocation_are_its_slots(spans, written):
    table = np.array([9, 3, 4, 5, 1, 0], np.int32)
    allocation = pc.Allocation([table[1:]], 1, BLOCK, [], spans, _written=written)
    mapping = allocation.slot_mapping
    assert slots_of(allocation.slot_runs(), len(mapping)) == mapping.tolist()
