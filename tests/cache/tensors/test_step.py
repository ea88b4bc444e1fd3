"""The slots of a step: runs give the same as single slots, and a step of allocations the same as its arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cache_cases import slots_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pc
from pc.cache.tensors.step import StepSlots

BLOCK = 4


@example([-1, 0, 1, 2])
@given(slots=st.lists(st.integers(-1, 40), max_size=60, unique_by=lambda slot: slot if slot >= 0 else object()))
@settings(max_examples=200, deadline=None)
def test_slots_given_one_by_one(slots):
    found = StepSlots.of(np.array(slots, np.int64))
    assert found.array.tolist() == found.index.tolist() == slots
    assert (found.count, found.low, found.high) == (len(slots), min(slots, default=0), max(slots, default=-1))
    assert found.kept.tolist() == [slot for slot in slots if slot >= 0]
    if found.runs is not None:
        assert slots_of(found.runs, len(slots)) == slots


def test_slots_without_long_runs_stay_slots():
    assert StepSlots.of(np.arange(0, 40, 2)).runs is None
    assert StepSlots.of(np.arange(40)).runs == [(0, 0, 40)]


@pytest.mark.parametrize("reuse", ["prefix", "gap"])
def test_a_step_of_allocations_has_their_slots(reuse):
    manager = pc.CacheManager(40, BLOCK)
    manager.allocate("a", list(range(16)))
    manager.commit("a", 16)
    allocations = {
        "whole": manager.allocate("whole", list(range(16)), reuse=reuse),  # its last slot is -1
        "b": manager.allocate("b", [*range(8), 50, 51, 52], reuse=reuse),
        "c": manager.allocate("c", [70, 71, 72], reuse=reuse),
    }
    step = pc.Step.of(allocations, {})
    mappings = [allocation.slot_mapping for allocation in allocations.values()]
    assert step.slots.array.tolist() == np.concatenate(mappings).tolist() == step.slot_mapping.tolist()
    assert step.slots.low == -1
    assert step.query_start_loc.tolist() == [0, *np.cumsum([len(mapping) for mapping in mappings])]
    assert step.positions.tolist() == [15, 8, 9, 10, 0, 1, 2]
    assert step.extents == ([0, 1, 4, 7], [16, 11, 3], False)
    copied = dataclasses.replace(step, outputs={"x": 1})
    assert copied.slot_mapping.tolist() == step.slot_mapping.tolist()
    assert copied.slots.runs == step.slots.runs
    by_arrays = pc.Step({}, step.slot_mapping, step.requests, step.query_start_loc, step.positions)
    assert by_arrays.extents == step.extents


def test_a_step_knows_whether_the_positions_of_a_request_have_gaps():
    positions = {True: [0, 1, 4, 0, 1], False: [2, 3, 4, 0, 1]}
    for scattered, each in positions.items():
        step = pc.Step({}, np.arange(5), ("a", "b"), np.array([0, 3, 5]), np.array(each))
        assert step.extents == ([0, 3, 5], [5, 2], scattered)
