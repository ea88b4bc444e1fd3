"""The contract of CacheManager, one fact a test."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

import pc


def test_bad_arguments_are_refused_by_name(manager):
    manager.allocate("a", [1])
    with pytest.raises(ValueError, match="request_id"):
        manager.allocate("a", [1])
    with pytest.raises(ValueError, match="reuse"):
        manager.allocate("b", [1], reuse="everything")
    with pytest.raises(ValueError, match="num_tokens"):
        manager.commit("a", 2)
    with pytest.raises(ValueError, match="num_tokens"):
        manager.rollback("a", 2)
    for call in (manager.free, manager.block_table, lambda r: manager.append(r, [1]), lambda r: manager.commit(r, 0)):
        with pytest.raises(KeyError, match="request_id"):
            call("unknown")
    with pytest.raises(ValueError, match="num_blocks"):
        pc.CacheManager(0)
    with pytest.raises(ValueError, match="policy"):
        pc.CacheManager(1, policy="nonesuch")
    with pytest.raises(ValueError, match="hash_algorithm"):
        pc.CacheManager(1, hash_algorithm="md4")


@pytest.mark.parametrize(
    "hint",
    [
        {"priority": "x"},
        {"priority": 1.5},
        {"priority": None},
        {"priority": True},
        {"ttl": "x"},
        {"ttl": -1.0},
        {"ttl": float("nan")},
    ],
)
def test_a_bad_hint_changes_nothing(hint):
    m = pc.CacheManager(4, block_size=4, policy="priority")
    with pytest.raises((TypeError, ValueError), match=next(iter(hint))):
        m.allocate("a", [1], **hint)
    m.check()
    assert m.stats().num_requests == 0


@pytest.mark.parametrize("value", [1.0, "1", None, True])
def test_positions_are_integers(manager, value):
    manager.allocate("a", [1, 2])
    for call in (manager.commit, manager.rollback):
        with pytest.raises(TypeError, match="num_tokens"):
            call("a", value)
    with pytest.raises(TypeError, match="group"):
        manager.block_table("a", value)
    manager.commit("a", np.int64(2))
    manager.rollback("a", np.int64(1))


def test_requests_from_many_threads():
    """The thread-safety statement of CacheManager: every method is atomic."""

    m = pc.CacheManager(64, block_size=4)
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for i in range(150):
                tokens = rng.integers(0, 2, int(rng.integers(1, 30))).tolist()
                try:
                    m.allocate((seed, i), tokens)
                except pc.OutOfBlocks:
                    continue
                m.commit((seed, i), len(tokens))
                m.append((seed, i), [1])
                m.free((seed, i))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    m.check()
    assert m.stats().held_blocks == 0


def test_the_victim_is_the_youngest_of_the_lowest_priority():
    m = pc.CacheManager(8, block_size=4)
    assert m.victim() is None
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", 2)):
        m.allocate(name, [1], priority=priority)
    assert m.victim() == "c"


@pytest.mark.parametrize("groups", [None, [pc.FullAttention(), pc.Recurrent()]], ids=["one", "states"])
def test_every_verb_from_several_threads_leaves_nothing_held(groups):
    m = pc.CacheManager(48, block_size=4, groups=groups, host_blocks=8)
    failures = []

    def step(rng, live, name):
        one = live[int(rng.integers(len(live)))] if live else None
        verb = rng.choice(["allocate", "commit", "append", "rollback", "fork", "preempt", "free"])
        if verb == "allocate" or one is None:
            m.allocate(name, rng.integers(0, 2, int(rng.integers(0, 20))), reuse=str(rng.choice(["prefix", "gap"])))
            live.append(name)
        elif verb == "commit":
            m.commit(one, m.num_tokens(one))
        elif verb == "append":
            m.append_each([one], [1])
        elif verb == "rollback":
            m.rollback(one, min(1, m.num_tokens(one)))
        elif verb == "fork":
            m.fork(one, name)
            live.append(name)
        elif verb == "preempt":
            m.preempt(one, mode=str(rng.choice(["swap", "recompute"])))
            live.remove(one)
            try:
                m.resume(one)
                live.append(one)
            except pc.OutOfBlocks:
                m.free(one)
        else:
            live.remove(one)
            m.free(one)

    def attempt(rng, live, name):
        try:
            step(rng, live, name)
        except pc.OutOfBlocks:
            if live:
                m.free(live.pop())
        except ValueError:  # a recurrent state that is not there
            if groups is None:
                raise

    def work(seed):
        rng, live = np.random.default_rng(seed), []
        try:
            for i in range(250):
                attempt(rng, live, (seed, i))
            for request_id in live:
                m.free(request_id)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    m.check()
    stats = m.stats()
    assert (stats.num_requests, stats.held_blocks, stats.host_blocks) == (0, 0, 0)
