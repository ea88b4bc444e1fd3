"""The callbacks of a manager: what they are told, when, and that nothing they do costs it any state."""

from __future__ import annotations

import threading

import pytest

import pc
from pc.cache.policies import POLICIES
from pc.cache.policies.lru import LRU


def full(policy="lru", num_blocks=4, **options):
    manager = pc.CacheManager(num_blocks, block_size=4, policy=policy, **options)
    manager.allocate("a", list(range(4 * num_blocks)))
    manager.commit("a", 4 * num_blocks)
    manager.free("a")
    return manager


class BrokenError(Exception):
    pass


def broken(*arguments):
    raise BrokenError


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_tier_that_raises_costs_nothing(policy):
    manager = full(policy)
    manager.on_evict = broken
    before = manager.stats()
    with pytest.raises(BrokenError):
        manager.allocate("b", [9] * 8)
    manager.check()
    assert manager.stats() == before
    manager.on_evict = None
    assert manager.allocate("c", list(range(16))).num_cached_tokens == 15
    manager.free("c")
    assert manager.allocate("d", [7] * 16).block_ids.size == 4
    manager.check()


@pytest.mark.parametrize("verb", ["append", "append_each", "checkpoint"])
def test_a_tier_that_raises_leaves_every_verb_undone(verb):
    groups = [pc.FullAttention(), pc.Recurrent(num_blocks=1)] if verb == "checkpoint" else None
    manager = pc.CacheManager(4, block_size=4, policy="lru", groups=groups)
    manager.allocate("a", list(range(12)))
    if groups:
        manager.checkpoint("a", 4)
    manager.commit("a", 12)
    manager.free("a")
    manager.allocate("b", [9] * 4)
    manager.commit("b", 4)
    manager.on_evict = broken
    before = manager.stats()
    calls = {
        "append": lambda: manager.append("b", [1] * 5),
        "append_each": lambda: manager.append_each(["b"], [1]),
        "checkpoint": lambda: manager.checkpoint("b", 4),
    }
    with pytest.raises(BrokenError):
        calls[verb]()
    manager.check()
    assert manager.stats() == before
    manager.on_evict = None
    calls[verb]()
    manager.check()


def test_a_tier_that_raises_leaves_a_request_preempted():
    manager = pc.CacheManager(4, block_size=4, policy="lru")
    manager.allocate("b", [9] * 4)
    manager.preempt("b")
    manager.allocate("x", list(range(16)))
    manager.commit("x", 16)
    manager.free("x")
    manager.on_evict = broken
    before = manager.stats()
    with pytest.raises(BrokenError):
        manager.resume("b")
    assert manager.stats() == before
    manager.on_evict = None
    assert manager.resume("b").block_ids.size == 1
    manager.check()


def test_blocks_are_handed_over_before_anything_changes_and_the_tier_says_what_it_took():
    manager = full()
    seen = []

    def save(group, blocks, hashes):
        stats = manager.stats()
        seen.append((group, sorted(blocks.tolist()), len(hashes), stats.num_requests))
        return hashes[:1]

    manager.on_evict = save
    manager.allocate("b", [9] * 8)
    assert seen == [(0, [2, 3], 2, 0)]
    assert manager.stats().offloaded_blocks == 1
    manager.check()


def test_a_tier_may_call_the_manager():
    manager = full()

    def save(group, blocks, hashes):
        manager.on_evict = None
        manager.allocate("inner", [3] * 4)
        manager.check()

    manager.on_evict = save
    manager.allocate("b", [9] * 8)
    assert manager.stats().num_requests == 2
    manager.check()


def test_a_slow_tier_stops_nobody_else():
    manager = full(num_blocks=8)
    entered, leave = threading.Event(), threading.Event()

    def save(group, blocks, hashes):
        entered.set()
        assert leave.wait(30)

    manager.on_evict = save
    thread = threading.Thread(target=manager.allocate, args=("slow", [9] * 8))
    thread.start()
    assert entered.wait(30)
    hit = manager.allocate("quick", list(range(16)))
    assert hit.num_cached_tokens == 15
    manager.commit("quick", 16)
    manager.append("quick", [])
    manager.free("quick")
    manager.check()
    with pytest.raises(RuntimeError, match="on_evict"):
        manager.reset()
    leave.set()
    thread.join()
    manager.check()
    assert manager.num_tokens("slow") == 8


def test_what_a_request_is_about_to_hold_is_not_evicted_for_it():
    manager = full()
    gone = []
    manager.on_evict = lambda group, blocks, hashes: gone.extend(blocks.tolist())
    a = manager.allocate("b", [*range(8), *[50] * 8])
    assert a.num_cached_tokens == 8
    assert not set(gone) & set(a.block_ids[:2].tolist())
    assert manager.pools[0].access_count[a.block_ids[0]] == 2, "a hit is counted once"
    manager.check()


class Listener:
    def __init__(self, act=lambda: None):
        self.events, self.act = [], act

    def stored(self, group, hashes, parent, token_ids, extra_keys):
        self.events.append(("stored", len(hashes)))
        self.act()

    def removed(self, group, hashes):
        self.events.append(("removed", len(hashes)))
        self.act()

    def cleared(self):
        self.events.append(("cleared",))
        self.act()


def test_a_listener_that_raises_is_logged_and_others_still_hear(cache_errors):
    manager = pc.CacheManager(4, block_size=4, policy="lru")
    other = Listener()
    manager.listeners.extend([Listener(broken), other])
    manager.allocate("a", list(range(16)))
    assert manager.commit("a", 16) == []
    assert cache_errors == ["Listener.stored raised; the manager goes on"]
    manager.free("a")
    assert manager.allocate("b", [9] * 4).block_ids.size == 1
    manager.free("b")
    manager.reset()
    assert other.events == [("stored", 4), ("removed", 1), ("cleared",)]
    manager.check()


def test_a_listener_may_call_the_manager_and_hears_of_that_afterwards():
    manager = pc.CacheManager(8, block_size=4, policy="lru")
    done = []

    def act():
        if not done:
            done.append(manager.stats().cached_blocks)
            manager.allocate("inner", [7] * 4)
            manager.commit("inner", 4)
            manager.free("inner")

    first, second = Listener(act), Listener()
    manager.listeners.extend([first, second])
    manager.allocate("a", list(range(8)))
    manager.commit("a", 8)
    assert first.events == second.events == [("stored", 2), ("stored", 1)]
    manager.check()


@pytest.mark.parametrize("calls_back", [False, True])
@pytest.mark.parametrize("hook", ["accessed", "hinted", "completed", "released", "victims", "finished", "clear"])
def test_a_policy_hook_that_raises_or_calls_back_costs_nothing(hook, calls_back, caplog, cache_errors):
    managers = []

    def act(self, *arguments):
        if calls_back and managers:
            managers[0].allocate("inner", [1])
        raise BrokenError

    manager = full(type("Mine", (LRU,), {hook: act}))
    managers.append(manager)
    manager.allocate("b", [9] * 8, priority=1)
    manager.commit("b", 8)
    manager.check()
    manager.free("b")
    assert manager.allocate("c", [5] * 16).block_ids.size == 4
    manager.free("c")
    manager.reset()
    manager.check()
    assert f"Mine.{hook} raised; the manager goes on" in cache_errors
    assert ("from within a hook" in caplog.text) == calls_back


@pytest.mark.parametrize("answer", [[], [0, 0], [99, 100], [-1, 0]])
def test_victims_that_cannot_be_evicted_are_not(answer, caplog, cache_errors):
    import numpy as np

    policy = type("Mine", (LRU,), {"victims": lambda self, count: np.array(answer, np.int32)})
    manager = full(policy)
    a = manager.allocate("b", [9] * 8)
    assert sorted(a.block_ids.tolist()) == [2, 3], "what was used longest ago, the tail first"
    assert "cannot be evicted" in caplog.text
    manager.check()
