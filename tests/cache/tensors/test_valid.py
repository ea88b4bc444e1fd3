"""The record of slots that hold a row gives the answers of sets of slots, whose blocks are allocated again."""

from __future__ import annotations

import types

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pc.cache.tensors.valid import ValidRows

BLOCK, BLOCKS = 4, 12


@given(data=st.data(), has_pool=st.booleans())
@settings(max_examples=200, deadline=None)
def test_flags_are_those_of_sets_of_slots(data, has_pool):
    pool = types.SimpleNamespace(taken_at=np.zeros(BLOCKS, np.int64), watchers=set()) if has_pool else None
    valid, rows = ValidRows(BLOCKS, BLOCK, pool), {"x": set(), "y": set()}
    for name in rows:
        valid.add(name)
    everything = np.arange(BLOCKS)
    for tick in range(1, data.draw(st.integers(1, 8)) + 1):
        again = data.draw(st.lists(st.integers(0, BLOCKS - 1), max_size=4)) if pool is not None else []
        if pool is not None:
            pool.taken_at[again] = tick
        written = data.draw(st.lists(st.integers(0, BLOCK * BLOCKS - 1), max_size=20, unique=True))
        if data.draw(st.booleans()):
            written = list(range(min(written, default=0), max(written, default=-1) + 1))
        names = data.draw(st.sampled_from([["x"], ["y"], ["x", "y"], []]))
        if pool is None:
            again = [slot // BLOCK for slot in written if slot % BLOCK == 0]
        for own in rows.values():
            own -= {slot for slot in own if slot // BLOCK in again} | set(written)
        valid.clear(np.array(written, np.int64))
        valid.mark(names, np.array(written, np.int64))
        for name in names:
            rows[name] |= set(written)
        there = valid.there(rows, everything)
        assert {name: set(np.flatnonzero(bits).tolist()) for name, bits in there.items()} == rows
        asked = data.draw(st.lists(st.integers(0, BLOCK * BLOCKS - 1), max_size=6))
        for chosen in (["x"], ["x", "y"]):
            held = all(slot in rows[name] for name in chosen for slot in asked)
            assert valid.holds(chosen, np.array(asked, np.int64)) == held
