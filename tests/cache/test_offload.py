"""The manager's callbacks: their arguments, when they are called, and that an error in one changes no state."""

from __future__ import annotations

import sys
import threading

import pytest
from cache_cases import Listener, run

import pc
from pc.cache.policies.lru import LRU


def full(policy="lru", num_blocks=4, **options):
    manager = pc.CacheManager(num_blocks, block_size=4, policy=policy, **options)
    run(manager, "a", list(range(4 * num_blocks)))
    return manager


class BrokenError(Exception):
    pass


def broken(*arguments):
    raise BrokenError


def verbs():
    """Yield a manager that must evict for a verb, the verb, and a check that the verb is complete."""
    full_manager = full()
    yield full_manager, lambda: full_manager.allocate("b", [9] * 8), lambda: full_manager.num_tokens("b") == 8
    for groups in (None, None, [pc.FullAttention(), pc.Recurrent(num_blocks=1)]):
        manager = pc.CacheManager(4, block_size=4, policy="lru", groups=groups)
        manager.allocate("a", list(range(12)))
        if groups:
            manager.checkpoint("a", 4)
        manager.commit("a", 12)
        manager.free("a")
        manager.allocate("b", [9] * 4)
        manager.commit("b", 4)
        if groups:
            yield manager, lambda m=manager: m.checkpoint("b", 4), lambda m=manager: m.block_table("b", 1)[0] == 0
        else:
            yield manager, lambda m=manager: m.append("b", [1] * 5), lambda m=manager: m.num_tokens("b") == 9
    manager = pc.CacheManager(4, block_size=4, policy="lru")
    manager.allocate("b", [9] * 4)
    manager.allocate("c", [8] * 4)
    manager.commit("b", 4)
    run(manager, "x", list(range(8)))
    yield manager, lambda: manager.append_each(["b", "c"], [1, 2]), lambda: manager.num_tokens("c") == 5
    resumed = pc.CacheManager(4, block_size=4, policy="lru")
    resumed.allocate("b", [9] * 4)
    resumed.preempt("b")
    run(resumed, "x", list(range(16)))
    yield resumed, lambda: resumed.resume("b"), lambda: resumed.num_tokens("b") == 4


@pytest.mark.parametrize("number", range(6))
def test_a_tier_that_raises_loses_its_blocks_and_nothing_else(number, cache_errors):
    manager, verb, is_done = list(verbs())[number]
    manager.on_evict = broken
    before = manager.stats()
    verb()
    assert is_done()
    manager.check()
    stats = manager.stats()
    assert (stats.failed_offloads, stats.offloaded_blocks) == (1, 0)
    lost = stats.evictions - before.evictions
    assert lost > 0
    assert cache_errors == [f"on_evict raised; {lost} blocks are lost, the manager continues"]
    assert manager.stats().held_blocks == sum(
        (manager.block_table(name, group) >= 0).sum()
        for name in ("b", "c")[: stats.num_requests]
        for group in range(len(manager.groups))
    ), "nothing is kept for a tier"


@pytest.mark.parametrize("interrupts", [1, 2])
@pytest.mark.parametrize("number", range(6))
def test_an_interrupt_in_a_tier_leaves_the_verb_done(number, interrupts):
    manager, verb, is_done = list(verbs())[number]

    def interrupted(*arguments):
        raise KeyboardInterrupt

    manager.on_evict = interrupted
    if interrupts == 2:  # and one while the first is handled

        def settle():
            del manager._state.settle
            raise KeyboardInterrupt

        manager._state.settle = settle
    with pytest.raises(KeyboardInterrupt):
        verb()
    assert is_done()
    manager.check()
    manager.on_evict = None
    for name in ("b", "c")[: manager.stats().num_requests]:
        manager.free(name)
    manager.check()
    assert manager.stats().held_blocks == 0


def test_the_blocks_are_whole_and_their_verb_is_done_and_the_tier_says_what_it_took():
    manager = full()
    seen = []

    def save(group, blocks, hashes):
        stats = manager.stats()
        assert hashes == known[2:][::-1], "the tail first"
        seen.append((group, sorted(blocks.tolist()), stats.num_requests, stats.evictions))
        return hashes[:1]

    manager.allocate("again", list(range(16)))
    known = manager.block_hashes("again")
    manager.free("again")
    manager.on_evict = save
    allocation = manager.allocate("b", [9] * 8)
    assert seen == [(0, sorted(allocation.block_ids.tolist()), 1, 2)]
    assert manager.stats().offloaded_blocks == 1
    manager.check()


def test_what_a_tier_is_given_is_not_handed_out_meanwhile():
    """Another thread, or the callback itself, may free the request that has the blocks."""
    manager = full()
    given = []

    def save(group, blocks, hashes):
        given.append(set(blocks.tolist()))
        blocks[:] = 0  # both belong to the callback
        hashes.clear()
        if len(given) == 1:
            manager.free("b")
            manager.check()
            assert manager.stats().held_blocks == 3
            with pytest.raises(pc.OutOfBlocks):
                manager.allocate("c", [7] * 8)
            manager.allocate("c", [7] * 4)

    manager.on_evict = save
    manager.allocate("b", [9] * 12)
    manager.check()
    assert len(given) == 2, "what the callback evicts is given to it as well"
    assert not given[0] & given[1]
    assert not given[0] & set(manager.block_table("c").tolist())
    assert (manager.stats().free_blocks, manager.stats().held_blocks) == (3, 1)


@pytest.mark.parametrize("where", ["before the tier is called", "in the tier", "when the blocks are given back"])
def test_blocks_of_an_interrupted_handover_go_back_when_its_thread_or_another_goes_on(where, monkeypatch):
    """The blocks are held for a thread inside the tier, and no longer for one that has left it or ended."""
    manager = full(num_blocks=8)
    evicted = pc.cache.offload.Evicted

    def interrupt(*arguments):
        monkeypatch.undo()
        raise KeyboardInterrupt

    manager.on_evict = lambda *_: None
    if where == "before the tier is called":
        monkeypatch.setattr(evicted, "hand_over", interrupt)
    elif where == "in the tier":
        manager.on_evict = interrupt
    else:
        monkeypatch.setattr(manager._state, "settle", interrupt)

    def work():
        with pytest.raises(KeyboardInterrupt):
            manager.allocate("b", [9] * 8)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert manager.num_tokens("b") == 8, "the verb was done"
    manager.free("b")
    assert (manager.stats().held_blocks, manager.stats().free_blocks) == (0, 2)
    manager.check()
    manager.reset()


def test_a_slow_tier_stops_nobody_else(monkeypatch):
    """No verb beside it asks for the frames of all threads, because in CPython 3.11 all threads may hang then."""
    manager = full(num_blocks=8)
    entered, leave = threading.Event(), threading.Event()

    def save(group, blocks, hashes):
        entered.set()
        assert leave.wait(30)

    manager.on_evict = save
    thread = threading.Thread(target=manager.allocate, args=("slow", [9] * 8))
    thread.start()
    assert entered.wait(30)
    monkeypatch.setattr(sys, "_current_frames", broken)
    hit = manager.allocate("quick", list(range(16)))
    assert hit.num_cached_tokens == 15
    manager.commit("quick", 16)
    manager.append("quick", [])
    manager.free("quick")
    manager.check()
    assert manager.num_tokens("slow") == 8
    manager.free("slow")
    assert manager.stats().held_blocks == 2, "they are held for the tier"
    with pytest.raises(RuntimeError, match="on_evict"):
        manager.reset()
    leave.set()
    thread.join()
    assert manager.stats().held_blocks == 0
    manager.check()
    manager.reset()


def test_what_a_request_is_about_to_hold_is_not_evicted_for_it():
    manager = full()
    gone = []
    manager.on_evict = lambda group, blocks, hashes: gone.extend(blocks.tolist())
    a = manager.allocate("b", [*range(8), *[50] * 8])
    assert a.num_cached_tokens == 8
    assert not set(gone) & set(a.block_ids[:2].tolist())
    assert manager.pools[0].access_count[a.block_ids[0]] == 2, "a hit is counted once"
    manager.check()


def test_a_listener_that_raises_is_logged_and_others_still_hear(cache_errors):
    manager = pc.CacheManager(4, block_size=4, policy="lru")
    other = Listener()
    manager.listeners.extend([Listener(broken), other])
    manager.allocate("a", list(range(16)))
    assert manager.commit("a", 16) == []
    assert cache_errors == ["Listener.stored raised; the manager continues"]
    manager.free("a")
    assert manager.allocate("b", [9] * 4).block_ids.size == 1
    manager.free("b")
    manager.reset()
    assert other.counts == [("stored", 4), ("removed", 1), ("cleared",)]
    manager.check()


def test_a_listener_may_call_the_manager_and_hears_of_that_afterwards():
    manager = pc.CacheManager(8, block_size=4, policy="lru")
    done = []

    def act():
        if not done:
            done.append(manager.stats().cached_blocks)
            run(manager, "inner", [7] * 4)

    first, second = Listener(act), Listener()
    manager.listeners.extend([first, second])
    manager.allocate("a", list(range(8)))
    manager.commit("a", 8)
    assert first.counts == second.counts == [("stored", 2), ("stored", 1)]
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
    assert f"Mine.{hook} raised; the manager continues" in cache_errors
    assert ("from within a hook" in caplog.text) == calls_back


@pytest.mark.quick
@pytest.mark.parametrize("answer", [[], [3, 3], [99, 100], [-1, 3], [0, 3], [[2, 3]], [[2], [3]]], ids=str)
def test_victims_that_cannot_be_evicted_are_not(answer, caplog, cache_errors):
    import numpy as np

    policy = type("Mine", (LRU,), {"victims": lambda self, count: np.array(answer, np.int32)})
    manager = full(policy)
    assert manager.allocate("holds block 0", range(4), num_tokens=0).block_ids.tolist() == [0]
    a = manager.allocate("b", [9] * 8)
    assert sorted(a.block_ids.tolist()) == [2, 3], "what was used longest ago, the tail first"
    assert "returned invalid victims" in caplog.text
    assert manager.stats().evictions == 2
    manager.check()
