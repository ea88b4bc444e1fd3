"""Reuse of the part of a block that a prompt shares with a cached block."""

from __future__ import annotations

import pytest
from cache_cases import run

import pc


def test_the_part_a_block_has_in_common_is_copied():
    m = pc.CacheManager(8, block_size=4, policy="lru", partial_reuse=True)
    a = run(m, "a", list(range(8)))
    b = m.allocate("b", [0, 1, 2, 3, 4, 5, 90, 91, 92])
    assert b.copies == [(a.block_ids[1], b.block_ids[1])]
    assert (b.cached_spans, b.compute_spans) == ([(0, 6)], [(6, 9)])
    assert b.slot_mapping.tolist() == [b.block_ids[1] * 4 + 2, b.block_ids[1] * 4 + 3, b.block_ids[2] * 4]
    assert m.stats().hit_tokens_by_cause == {"prefix": 4, "gap": 0, "partial": 2}
    m.commit("b", 9)
    m.free("b")
    assert m.allocate("c", [0, 1, 2, 3, 4, 5, 90, 91]).num_cached_tokens == 7
    m.check()


def test_a_partial_hit_respects_salts_images_and_the_last_token():
    m = pc.CacheManager(16, block_size=4, policy="lru", partial_reuse=True)
    run(m, "a", [1, 2, 3, 4], salt="x")
    assert m.allocate("b", [1, 2, 3, 9]).num_cached_tokens == 0
    assert m.allocate("c", [1, 2, 3, 9], salt="x").num_cached_tokens == 3
    assert m.allocate("d", [1, 2, 3], salt="x").num_cached_tokens == 2
    assert m.allocate("e", [1, 2, 3, 9], salt="x", extra_keys=pc.KeyAt(0, "image")).num_cached_tokens == 0
    m.check()


def test_the_source_of_a_partial_hit_is_not_evicted_for_it():
    m = pc.CacheManager(3, block_size=4, policy="lru", partial_reuse=True)
    a = run(m, "a", list(range(4)))
    b = m.allocate("b", [0, 1, 50, 51, 52])
    assert b.copies == [(a.block_ids[0], b.block_ids[0])]
    assert a.block_ids[0] not in b.block_ids
    m.free("b")
    run(m, "e", [77] * 8)
    c = m.allocate("c", [0, 1, 60, 61, 62, 63, 64, 65, 66])
    assert (c.copies, c.num_cached_tokens) == ([], 0), "its source has to go"
    m.check()
    m.free("c")
    m.reset()
    with pytest.raises(ValueError, match="partial_reuse"):
        pc.CacheManager(4, partial_reuse=True, groups=[pc.SlidingWindow(window=4)])


def test_a_swapped_block_is_loaded_and_not_copied_from_one_that_begins_like_it():
    manager = pc.CacheManager(num_blocks=8, block_size=4, host_blocks=4, partial_reuse=True)
    manager.allocate("swapped", [1, 1])
    manager.commit("swapped", 2)
    run(manager, "alike", [1, 0, 0, 0])
    assert manager.preempt("swapped", "swap")
    allocation = manager.resume("swapped")
    assert len(allocation.loads) == 1
    assert not allocation.copies
