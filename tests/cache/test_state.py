"""State that verbs share: counters, windows that move, pools that are emptied."""

from __future__ import annotations

import pytest
from cache_cases import run

import pc
from pc.cache.policies import POLICIES


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_after_a_reset_blocks_are_shared_as_before_it(policy: str) -> None:
    manager = pc.CacheManager(num_blocks=64, block_size=4, policy=policy)
    for turn in range(2):
        for name in ("first", "second"):
            allocation = manager.allocate(name, [*range(20), 99])
            assert allocation.num_cached_tokens == (20 if name == "second" else 0), turn
            manager.commit(name, 21)
        manager.free("first")
        manager.free("second")
        manager.reset()


def test_reset_needs_no_running_request(manager):
    manager.allocate("a", list(range(8)))
    with pytest.raises(RuntimeError, match="running"):
        manager.reset()
    manager.free("a")
    run(manager, "b", list(range(8)))
    manager.reset()
    assert manager.stats().free_blocks == 16
    assert manager.allocate("c", list(range(8))).num_cached_tokens == 0


def test_stats_count_tokens_and_blocks(manager):
    run(manager, "a", list(range(10)))
    manager.allocate("b", list(range(10)))
    s = manager.stats()
    assert (s.queried_tokens, s.hit_tokens, s.hit_rate) == (20, 8, 0.4)
    assert (s.free_blocks, s.cached_blocks, s.held_blocks, s.num_blocks) == (13, 0, 3, 16)
    assert {type(value) for value in vars(s).values()} == {int, dict, tuple}


def test_states_are_evicted_like_blocks_and_run_out():
    m = pc.CacheManager(16, block_size=4, groups=[pc.FullAttention(), pc.Recurrent(num_blocks=1)], policy="lru")
    m.allocate("a", list(range(8)))
    m.checkpoint("a", 4)
    with pytest.raises(pc.OutOfBlocks):
        m.checkpoint("a", 8)
    m.commit("a", 8)
    m.free("a")
    assert m.allocate("b", list(range(8))).num_cached_tokens == 4
    m.commit("b", 8)
    m.free("b")
    m.allocate("c", [9] * 4)
    m.checkpoint("c", 4)
    assert m.stats().evictions == 1
    m.check()


def test_groups_have_pools_of_their_own():
    m = pc.CacheManager(8, block_size=4, groups=[pc.FullAttention(), pc.SlidingWindow(num_blocks=3, window=4)])
    with pytest.raises(pc.OutOfBlocks, match="needs 4 blocks, 3"):
        m.allocate("a", list(range(16)))
    assert m.stats().free_blocks == 11
    m.allocate("b", list(range(12)))
    m.commit("b", 12)
    for t in range(12, 20):
        m.append("b", [t])
        m.commit("b", t + 1)
    m.check()
