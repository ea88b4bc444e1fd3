"""The invariants of a manager, which `CacheManager.check` asserts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..state import ManagerState


def check(state: ManagerState) -> None:
    """Assert every invariant of requests, and then those of each pool (`BlockPool.check`)."""
    size, running = state.block_size, state.running
    assert state.snapshot is None, "a verb was left in the middle"
    assert {r.writing: i for i, r in running.items() if r.writing is not None} == state.writers, "a lost writer"
    for group, pool in enumerate(state.pools):
        for request in running.values():
            held = request.held(group)
            assert np.unique(held).size == held.size, "a request holds a block twice"
            assert request.num_blocks == -(-len(request.tokens) // size), "a table has another length"
            assert request.committed <= len(request.tokens), "more committed than there is"
            assert request.published * size <= request.committed, "published before it was written"
            before = request.written_table(group, request.published)
            assert pool.table.contains(before[before >= 0]).all(), "a committed block is not published"
        pool.check(np.concatenate(state.references(group)))
        slots = state.host_slots(group)
        assert len(set(slots)) == len(slots) <= state.host_blocks, "a host slot is in two places"
