"""The record of slots that hold a row: spans of slots and single slots give the same answers."""

from __future__ import annotations

import types

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pc.cache.tensors.valid import ValidRows

BLOCK, BLOCKS = 4, 12


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_spans_and_single_slots_leave_the_same_flags(data):
    pool = types.SimpleNamespace(taken_at=np.zeros(BLOCKS, np.int64), watchers=set())
    by_span, by_slot = (ValidRows(BLOCKS, BLOCK, pool) for _ in range(2))
    for valid in (by_span, by_slot):
        for name in ("x", "y"):
            valid.add(name)
    everything = np.arange(BLOCKS)
    for tick in range(1, data.draw(st.integers(1, 8)) + 1):
        pool.taken_at[data.draw(st.lists(st.integers(0, BLOCKS - 1), max_size=4))] = tick
        first = data.draw(st.integers(0, BLOCKS * BLOCK - 1))
        end = data.draw(st.integers(first + 1, BLOCKS * BLOCK))
        names = data.draw(st.sampled_from([["x"], ["y"], ["x", "y"], []]))
        by_span.clear_spans([(first, end)])
        by_span.mark(names, [slice(first, end)])
        by_slot.clear(np.arange(first, end))
        by_slot.mark(names, [np.arange(first, end)])
        there = by_slot.there(["x", "y"], everything)
        got = by_span.there(["x", "y"], everything)
        assert all((there[name] == got[name]).all() for name in there)
        asked = data.draw(st.integers(0, BLOCKS * BLOCK - 1))
        behind = data.draw(st.integers(asked + 1, BLOCKS * BLOCK))
        for name in there:
            assert by_span.holds([name], [(asked, behind)]) == there[name][asked:behind].all()
