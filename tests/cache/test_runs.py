"""Runs of slots: they say the same as the slots one by one, and so does the ledger that is told of them."""

from __future__ import annotations

import dataclasses
import itertools
import types

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pc
from pc.cache.row_ledger import RowLedger
from pc.cache.runs import ascending, block_runs
from pc.cache.step_slots import StepSlots

BLOCK, BLOCKS = 4, 12


def slots_of(runs, count):
    """Slots of runs, -1 where there is none; a slot that two runs give shows as an error."""
    slots = np.full(count, -1, np.int64)
    for begin, first, end in runs:
        assert end > first
        assert (slots[begin : begin + end - first] == -1).all()
        slots[begin : begin + end - first] = np.arange(first, end)
    return slots.tolist()


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
    runs = block_runs(blocks, BLOCK, begin, count)
    assert slots_of(runs, count) == want[begin : begin + count]
    assert all(a[2] != b[1] or a[0] + a[2] - a[1] != b[0] for a, b in itertools.pairwise(runs))


def test_runs_in_ascending_order_touch_nowhere():
    assert ascending([(0, 32, 48), (16, 16, 32), (32, 0, 16), (48, 50, 60)]) == [(0, 48), (50, 60)]


@example([-1, 0, 1, 2])
@given(slots=st.lists(st.integers(-1, 40), max_size=60, unique_by=lambda slot: slot if slot >= 0 else object()))
@settings(max_examples=200, deadline=None)
def test_slots_given_one_by_one(slots):
    found = StepSlots.of(np.array(slots, np.int64))
    assert found.array.tolist() == found.index.tolist() == slots
    assert (found.count, found.low, found.high) == (len(slots), min(slots, default=0), max(slots, default=-1))
    if found.runs is not None:
        assert slots_of(found.runs, len(slots)) == slots
        kept = [slot for first, end in found.spans for slot in range(first, end)]
        assert kept == sorted(slot for slot in slots if slot >= 0)


def test_slots_without_long_runs_stay_slots():
    assert StepSlots.of(np.arange(0, 40, 2)).runs is None
    assert StepSlots.of(np.arange(40)).runs == [(0, 0, 40)]


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("spans", [[(4, 8), (14, 20)], [(9, 10)], [(8, 9), (12, 18), (19, 20)]])
def test_runs_of_an_allocation_are_its_slots(spans, written):
    table = np.array([9, 3, 4, 5, 1, 0], np.int32)
    allocation = pc.Allocation([table[1:]], 1, BLOCK, [], spans, written=written)
    mapping = allocation.slot_mapping
    assert slots_of(allocation.slot_runs(), len(mapping)) == mapping.tolist()


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
    assert [part.num_tokens for part in step.parts] == [16, 11, 3]
    copied = dataclasses.replace(step, outputs={"x": 1})
    assert copied.slot_mapping.tolist() == step.slot_mapping.tolist()
    assert copied.slots.runs == step.slots.runs
    by_arrays = pc.Step({}, step.slot_mapping, step.requests, step.query_start_loc, step.positions)
    assert by_arrays.parts == step.parts


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_ledger_told_of_spans_and_one_told_of_slots_agree(data):
    pool = types.SimpleNamespace(taken_at=np.zeros(BLOCKS, np.int64))
    by_span, by_slot = (RowLedger(BLOCKS, BLOCK, pool) for _ in range(2))
    for ledger in (by_span, by_slot):
        for name in ("x", "y"):
            ledger.add(name)
    everything = np.arange(BLOCKS)
    for tick in range(1, data.draw(st.integers(1, 8)) + 1):
        pool.taken_at[data.draw(st.lists(st.integers(0, BLOCKS - 1), max_size=4))] = tick
        first = data.draw(st.integers(0, BLOCKS * BLOCK - 1))
        end = data.draw(st.integers(first + 1, BLOCKS * BLOCK))
        names = data.draw(st.sampled_from([["x"], ["y"], ["x", "y"], []]))
        by_span.vacate_spans([(first, end)])
        by_span.mark_spans(names, [(first, end)])
        by_slot.vacate(np.arange(first, end))
        by_slot.mark(names, np.arange(first, end))
        there = by_slot.there(["x", "y"], everything)
        got = by_span.there(["x", "y"], everything)
        assert all((there[name] == got[name]).all() for name in there)
        asked = data.draw(st.integers(0, BLOCKS * BLOCK - 1))
        behind = data.draw(st.integers(asked + 1, BLOCKS * BLOCK))
        for name in there:
            assert by_span.holds([name], [(asked, behind)]) == there[name][asked:behind].all()
