"""An interrupt at any line of a verb: either the verb is complete or nothing has happened, and other threads go on."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import pytest

import pc

FOLDER = os.path.realpath(os.path.dirname(pc.cache.__file__))


class Index:
    """A listener that knows what is published, as a router does: notified twice it knows the same."""

    def __init__(self):
        self.published = set()

    def stored(self, group, hashes, parent, token_ids, extra_keys):
        self.published |= {(group, block_hash) for block_hash in hashes}

    def removed(self, group, hashes):
        self.published -= {(group, block_hash) for block_hash in hashes}

    def cleared(self):
        self.published = set()


def one_group(policy, num_blocks=20, **options):
    manager = pc.CacheManager(num_blocks, block_size=2, policy=policy, host_blocks=4, **options)
    manager.listeners.append(Index())
    for i in range(4):
        manager.allocate(("old", i), [i] * 6)
        manager.commit(("old", i), 6)
        manager.free(("old", i))
    manager.allocate("a", [1] * 6 + [7, 8, 9])
    manager.allocate("b", [2] * 6 + [5])
    manager.commit("b", 7)
    manager.fork("b", "c")
    manager.allocate("twin", [1] * 6 + [7, 8, 9])
    manager.commit("twin", 9)
    manager.allocate("chunked", [5] * 6, num_tokens=2)
    manager.allocate("waiting", [2] * 6 + [6, 6])
    manager.commit("waiting", 8)
    manager.preempt("waiting", "swap")
    return manager


def several_groups(policy):
    groups = [pc.FullAttention(), pc.SlidingWindow(window=3), pc.Recurrent(num_blocks=3)]
    manager = pc.CacheManager(16, block_size=2, policy=policy, host_blocks=6, groups=groups)
    manager.listeners.append(Index())
    manager.allocate("old", [9] * 9)
    manager.checkpoint("old", 4)
    manager.checkpoint("old", 8)
    manager.commit("old", 9)
    manager.free("old")
    manager.allocate("a", [1] * 8)
    manager.checkpoint("a", 6)
    manager.allocate("b", [2] * 6)
    manager.commit("b", 6)
    manager.fork("b", "c")
    return manager


def with_a_tier(policy):
    manager = one_group(policy)
    manager.on_evict = lambda group, blocks, hashes: hashes
    return manager


def with_partial_reuse(policy):
    return one_group(policy, partial_reuse=True)


def with_moved_text(policy):
    manager = one_group(policy, 32, partial_reuse=True)
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    manager.allocate("text", text, reuse="anywhere")
    manager.commit("text", 8)
    manager.free("text")
    manager.allocate("moved", [8, *text, 8], reuse="anywhere")
    return manager


VERBS = {
    "allocate": lambda m: m.allocate("n", [3] * 6 + [1, 2, 3]),
    "allocate a part of a block": lambda m: m.allocate("n", [3] * 5 + [1]),
    "append": lambda m: m.append("c", [1, 2]),
    "append a chunk": lambda m: m.append("chunked", [5, 5, 5]),
    "append_each": lambda m: m.append_each(["a", "b", "chunked"], [1, 1, 5]),
    "commit": lambda m: m.commit("a", 9),
    "rollback": lambda m: m.rollback("a", 4),
    "fork": lambda m: m.fork("a", "x"),
    "free": lambda m: m.free("b", returns=0.5),
    "free a preempted one": lambda m: m.free("waiting"),
    "preempt": lambda m: m.preempt("b", "swap"),
    "resume": lambda m: m.resume("waiting"),
}
MOVED = {
    "the first anywhere": lambda m: m.allocate("n", [3] * 9, reuse="anywhere"),
    "allocate anywhere": lambda m: m.allocate("n", [7, 3, 1, 4, 1, 5, 9, 2, 7], reuse="anywhere"),
    "commit moved": lambda m: m.commit("moved", 10),
    "rollback moved": lambda m: m.rollback("moved", 4),
}
GROUPED = {
    "allocate": lambda m: m.allocate("n", [9] * 9),
    "append": lambda m: m.append("b", [1, 2]),
    "append_each": lambda m: m.append_each(["a", "b"], [1, 1]),
    "commit": lambda m: m.commit("a", 8),
    "checkpoint": lambda m: m.checkpoint("b", 4),
    "rollback": lambda m: m.rollback("b", 6),
    "preempt": lambda m: m.preempt("b", "swap"),
}
CASES = [(one_group, name) for name in VERBS] + [(several_groups, name) for name in GROUPED]
CASES += [(one_group, "the first anywhere"), *[(with_moved_text, name) for name in list(MOVED)[1:]]]
TAKING = ("allocate", "append", "append_each", "resume")
CASES += [(with_a_tier, name) for name in TAKING]
CASES += [(with_partial_reuse, name) for name in ("allocate", "allocate a part of a block", "commit")]


def seen(manager):
    """All that a caller can see."""
    state, groups = manager._state, range(len(manager.groups))
    running = {
        name: (
            request.tokens.tolist(),
            request.pending,
            [manager.block_table(name, group).tolist() for group in groups],
            (request.committed, request.computed, request.published, request.released, request.new_states),
            [ids.tolist() for ids in request.replaced or []],
            (request.loading, request.writing, request.shared_tail and request.shared_tail.end),
            manager.block_hashes(name),
        )
        for name, request in state.running.items()
    }
    preempted = {name: (saved.tokens.tolist(), saved.slots) for name, saved in state.preempted.items()}
    published = [sorted(pool.digests_of(pool.complete.nonzero()[0])) for pool in manager.pools]
    partial = state.partial and {key: set(value) for key, value in state.partial._behind.items()}
    return (manager.stats(), list(running.items()), preempted, published, manager.victim(), partial)


def interrupt(manager, verb, line):
    """Runs a verb and raises before its line of this number; where that was, None where it has fewer."""
    count, place = 0, None

    def local(frame, event, argument):
        nonlocal count, place
        if event == "line":
            count += 1
            if count == line:
                place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def start(frame, event, argument):
        return local if os.path.realpath(frame.f_code.co_filename).startswith(FOLDER) else None

    sys.settrace(start)
    try:
        verb(manager)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return place


def assert_usable(manager, place):
    """It is consistent, listeners know what is published, other threads are served, and all can be ended."""
    manager.check()
    other = threading.Thread(target=manager.stats, daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive(), f"the lock was kept at {place}"
    for name in [*manager._state.running, *manager._state.preempted]:
        manager.free(name)
    manager.check()
    manager.allocate("next", [4] * 20)
    manager.commit("next", 20)
    manager.check()
    (index,) = manager.listeners
    there = {(g, h) for g, p in enumerate(manager.pools) for h in p.digests_of(p.complete.nonzero()[0])}
    assert index.published == there, f"listeners know something else after {place}"


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["lru", "default"])
@pytest.mark.parametrize(("build", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_an_interrupt_leaves_everything_or_nothing(build, name, policy, stride):
    if stride > 1 and (policy == "lru") == (build is one_group):
        pytest.skip("the slow variant has it")
    verb = (GROUPED if build is several_groups else VERBS | MOVED)[name]
    before, after = build(policy), build(policy)
    verb(after)
    states = [seen(before), seen(after)]
    if build is with_a_tier:  # blocks that were saved are free: what was evicted for a verb stays evicted
        states = [state[1:3] for state in states]
    line, outcomes = 1, set()
    while True:
        manager = build(policy)
        place = interrupt(manager, verb, line)
        if place is None:
            break
        state = seen(manager)
        state = state[1:3] if build is with_a_tier else state
        assert state in states, f"half of {name} after an interrupt at {place}"
        outcomes.add(states.index(state))
        assert_usable(manager, place)
        line += stride
    assert line > 20
    assert stride > 1 or outcomes == {0, 1} or states[0] == states[1]


def test_a_second_interrupt_while_the_first_is_undone(monkeypatch):
    line, times = 150, []
    while not times:
        manager = one_group("default")
        before = seen(manager)
        rebuild = manager._state._rebuild

        def interrupted(rebuild=rebuild):
            times.append(1)
            if len(times) < 4:
                raise KeyboardInterrupt
            rebuild()

        monkeypatch.setattr(manager._state, "_rebuild", interrupted)
        interrupt(manager, VERBS["allocate"], line)
        line += 10
    assert len(times) == 4
    assert seen(manager) == before
    assert_usable(manager, "the rebuilding")


class StopError(BaseException):
    pass


def test_an_exception_of_another_thread_is_like_an_interrupt():
    """`PyThreadState_SetAsyncExc` raises between two instructions, wherever a verb is."""
    manager, number, stopped, failures = one_group("default"), 0, [], []

    def work():
        nonlocal number
        try:
            while True:
                number += 1
                manager.allocate(number, [number % 7] * 5 + [number])
                manager.append(number, [1, 2])
                manager.commit(number, 8)
                manager.free(number)
        except StopError:
            pass
        for name in [name for name in manager._state.running if isinstance(name, int)]:
            manager.free(name)
        manager.check()
        stopped.append(number)

    def go_on():
        while len(stopped) < 25:
            try:
                work()
            except StopError:  # noqa: PERF203  it came in between
                pass
            except BaseException as error:
                failures.append(error)
                return

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.004)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(StopError))
    thread.join(1)
    assert not thread.is_alive()
    assert not failures
    manager.check()
