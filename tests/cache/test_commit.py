"""Committed blocks are found by later requests, and merged with equal ones, states included."""

from __future__ import annotations

import pytest
from cache_cases import recurrent, run

import pc


def test_twins_are_merged_at_commit(manager):
    a = manager.allocate("a", list(range(9)))
    b = manager.allocate("b", list(range(9)))
    assert manager.commit("a", 9) == []
    pairs = manager.commit("b", 9)
    assert pairs == list(zip(b.block_ids[:2].tolist(), a.block_ids[:2].tolist(), strict=True))
    assert manager.block_table("b")[:2].tolist() == a.block_ids[:2].tolist()
    assert manager.stats().merged_blocks == 2


def test_replaced_block_is_held_until_next_commit():
    m = pc.CacheManager(6, block_size=4, policy="lru")
    m.allocate("a", list(range(9)))
    m.allocate("b", list(range(9)))
    m.commit("a", 9)
    m.commit("b", 9)
    with pytest.raises(pc.OutOfBlocks):
        m.allocate("c", [50])
    m.commit("b", 9)
    assert m.allocate("c", [50]).block_ids.size == 1
    m.check()


def test_second_writer_may_be_first(manager):
    manager.allocate("a", list(range(8)))
    b = run(manager, "b", list(range(8)))
    assert manager.commit("a", 8) != []
    assert manager.block_table("a").tolist() == b.block_ids.tolist()


def test_a_state_is_not_findable_before_the_commit_that_passes_it():
    m = recurrent()
    m.allocate("a", list(range(12)))
    m.checkpoint("a", 8)
    m.commit("a", 7)
    assert m.allocate("b", list(range(12))).num_cached_tokens == 0
    m.commit("a", 8)
    assert m.allocate("c", list(range(12))).num_cached_tokens == 8
    m.checkpoint("a", 4)  # also for an earlier position; the next commit publishes it
    m.commit("a", 8)
    assert m.allocate("d", [*range(4), 9, 9]).num_cached_tokens == 4
    m.check()


def test_equal_states_are_merged():
    m = recurrent()
    for name in "ab":
        m.allocate(name, list(range(8)))
    first, second = m.checkpoint("a", 8), m.checkpoint("b", 8)
    assert m.commit("a", 8) == [[], []]
    assert m.commit("b", 8)[1] == [(second, first)]
    m.check()
