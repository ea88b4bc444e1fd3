"""Rollbacks, which remove tokens and the blocks that only they needed."""

from __future__ import annotations

import pytest

import pc


def test_a_findable_block_is_held_until_it_is_copied_although_its_other_holder_ends():
    m = pc.CacheManager(4, block_size=2, policy="lru")
    m.allocate("a", [1, 2, 3, 4])
    m.commit("a", 4)
    m.allocate("b", [1, 2, 3, 4, 5])
    m.rollback("a", 1)
    source = int(m.block_table("a")[1])
    assert m.append("a", [9]).copies == [(source, int(m.block_table("a")[1]))]
    m.free("b")
    with pytest.raises(pc.OutOfBlocks):  # another thread would write it before the copy is made
        m.allocate("c", [7] * 4)
    m.commit("a", 4)
    assert source in m.allocate("c", [7] * 4).block_ids
    m.check()


def test_rollback_cannot_bring_back_what_left_the_window():
    m = pc.CacheManager(8, block_size=4, groups=[pc.SlidingWindow(window=4)])
    m.allocate("a", list(range(16)))
    m.commit("a", 16)
    with pytest.raises(ValueError, match="behind the window were released"):
        m.rollback("a", 2)
    m.rollback("a", 1)
    m.check()


def test_rollback_to_nothing_gives_back_what_is_left_of_a_window():
    manager = pc.CacheManager(8, block_size=4, groups=[pc.SlidingWindow(window=4)])
    manager.allocate("a", list(range(20)))
    manager.commit("a", 20)
    manager.rollback("a", 20)
    manager.check()
    assert manager.stats().held_blocks == 0
    manager.append("a", [7] * 20)
    manager.commit("a", 20)
    manager.check()
    assert manager.stats().held_blocks == 1
