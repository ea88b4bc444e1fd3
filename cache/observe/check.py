"""The invariants of a manager, which `CacheManager.check` asserts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..pool import BlockPool
    from ..state import ManagerState
    from ..table import Ids


def check(state: ManagerState) -> None:
    """Assert the invariants of all requests and of all pools."""
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
        check_pool(pool, np.concatenate(state.references(group)))
        slots = state.host_slots(group)
        assert len(set(slots)) == len(slots) <= state.host_blocks, "a host slot is in two places"


def check_pool(pool: BlockPool, held: Ids) -> None:
    """Assert every invariant of a pool. `held` are all block references, with repetition."""
    refs = np.bincount(held, minlength=pool.num_blocks) if held.size else np.zeros(pool.num_blocks, np.int64)
    assert np.array_equal(refs, pool.ref_count), "reference counts differ from what requests hold"
    free, listed = pool._free[: pool.num_free], pool.table.listed
    assert np.unique(free).size == free.size, "a block is free twice"
    assert not pool.ref_count[free].any(), "a free block is held"
    assert not listed[free].any(), "a free block is published"
    assert not pool.words[~listed].any(), "a block that is not published has a hash"
    cached = (pool.ref_count == 0) & listed
    assert int(cached.sum()) == pool.num_cached, "the count of cached blocks is wrong"
    in_use = int(np.count_nonzero(pool.ref_count))
    assert free.size + pool.num_cached + in_use == pool.num_blocks, "free + cached + held differs from all"
    pool.table.check()
    pool.policy.check()
