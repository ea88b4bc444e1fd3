"""After an interrupt at any line of a verb, the verb is either complete or undone, and other threads continue."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import pytest
from cache_cases import Listener, published_by, run
from cache_model import Interrupts

import pc


def one_group(policy, num_blocks=20, **options):
    manager = pc.CacheManager(num_blocks, block_size=2, policy=policy, host_blocks=4, **options)
    manager.listeners.append(Listener())
    for i in range(4):
        run(manager, ("old", i), [i] * 6)
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
    manager.listeners.append(Listener())
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
    run(manager, "text", text, reuse="anywhere")
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
    "fork": lambda m: m.fork("b", "x"),
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


NAMES = [*[("old", i) for i in range(4)], "old", "a", "b", "c", "twin", "chunked", "waiting", "text", "moved", "n", "x"]


def ask(call, *arguments, **options):
    """Return the result of a call, or the error that it raises."""
    try:
        return call(*arguments, **options)
    except Exception as error:
        return type(error).__name__


def seen(manager):
    """Return all that a caller can read without changing anything."""
    groups = range(len(manager.groups))
    tables = [[str(ask(manager.block_table, name, group)) for group in groups] for name in NAMES]
    requests = [(ask(manager.num_tokens, name), ask(manager.block_hashes, name)) for name in NAMES]
    published = [sorted(pool.digests_of(pool.complete.nonzero()[0])) for pool in manager.pools]
    return statistics(manager), tables, requests, published, manager.victim()


def statistics(manager, *ignored):
    """Return the counters without those of a tier, since a verb may be interrupted before it calls the tier."""
    ignored += ("offloaded_blocks", "failed_offloads")
    return {name: value for name, value in vars(manager.stats()).items() if name not in ignored}


def goes_on(manager):
    """Continue the requests, and return what shows what they hold, who computes which blocks, and what forks share."""
    groups, script = range(len(manager.groups)), []
    changed = ("residency", "residency_sum", "evictions", "cached_blocks", "free_blocks", "hit_tokens")
    changed += ("hit_tokens_by_cause",)  # a policy may choose other victims
    for number, token in enumerate((1, 2, 5, 3)):
        script.append(getattr(ask(manager.allocate, ("probe", number), [token] * 9), "wait_for", "refused"))
        script.append(ask(manager.free, ("probe", number)))
    for name in NAMES:
        step = ask(manager.append, name, [1])
        script.append(step if isinstance(step, str) else (step.compute_spans, len(step.group_copies(0))))
        merged = ask(lambda: manager.commit(name, manager.num_tokens(name)))  # noqa: B023
        holes = [ask(lambda: (manager.block_table(name, g) < 0).tolist()) for g in groups]  # noqa: B023
        script.append((len(merged), holes, statistics(manager, *changed)))
    for name in reversed(NAMES):
        script.append(isinstance(ask(manager.preempt, name, "swap"), str))
        script += [isinstance(ask(manager.resume, name), str), ask(manager.free, name), statistics(manager, *changed)]
        manager.check()
    return script


def interrupt(manager, verb, *numbers):
    """Run a verb and raise at its place of this number; return that place, or None if it has fewer places.

    Further numbers count from where the verb's changes begin to be undone.
    """
    interrupts, honest = Interrupts(*numbers), manager._state.undo

    def undo(*arguments):  # an exception in a tracing function ended the tracing
        with interrupts:
            honest(*arguments)

    manager._state.undo = undo
    with contextlib.suppress(KeyboardInterrupt), interrupts:
        verb(manager)
    return ", then ".join(interrupts.places) or None


def assert_usable(manager, place):
    """Check that the manager is consistent, listeners know the published blocks, and threads and requests continue."""
    manager.check()
    other = threading.Thread(target=manager.stats, daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive(), f"the lock was kept at {place}"
    for name in NAMES:
        ask(manager.free, name)
    manager.check()
    stats = manager.stats()
    assert (stats.num_requests, stats.held_blocks, stats.host_blocks) == (0, 0, 0)
    manager.allocate("next", [4] * 20)
    manager.commit("next", 20)
    manager.check()
    (listener,) = manager.listeners
    assert listener.published == published_by(manager), f"listeners know something else after {place}"


@pytest.mark.parametrize("stride", [47, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["lru", "default"])
@pytest.mark.parametrize(("build", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_an_interrupt_leaves_everything_or_nothing(build, name, policy, stride):
    if stride > 1 and (policy == "lru") == (build is one_group):
        pytest.skip("the slow variant has it")
    verb = (GROUPED if build is several_groups else VERBS | MOVED)[name]
    before, after = build(policy), build(policy)
    verb(after)
    states = [seen(before), seen(after)]
    scripts = [goes_on(before), goes_on(after)]
    number, outcomes = 1, set()
    while True:
        manager = build(policy)
        place = interrupt(manager, verb, number)
        if place is None:
            break
        state = seen(manager)
        assert state in states, f"half of {name} after an interrupt at {place}"
        outcome = states.index(state)
        outcomes.add(outcome)
        if number % 2:
            assert_usable(manager, place)
        else:
            assert goes_on(manager) == scripts[outcome], f"{name} goes on otherwise after an interrupt at {place}"
        number += stride
    assert number > 15  # a preempted request is freed in that many places
    assert stride > 1 or outcomes == {0, 1} or states[0] == states[1]


READS = {
    "num_tokens": lambda m: m.num_tokens("a"),
    "block_table": lambda m: m.block_table("b"),
    "stats": lambda m: m.stats(),
}


@pytest.mark.parametrize("name", READS)
def test_an_interrupt_of_a_read_keeps_no_lock(name):
    number = 1
    while place := interrupt(manager := one_group("lru"), READS[name], number):
        assert_usable(manager, place)
        number += 1
    assert number > 4


def test_a_rollback_that_has_removed_its_tokens_is_complete(monkeypatch):
    after, manager, rollback = one_group("lru"), one_group("lru"), pc.cache.manager.fork.rollback
    VERBS["rollback"](after)

    def interrupted(*arguments):
        rollback(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(pc.cache.manager.fork, "rollback", interrupted)
    with pytest.raises(KeyboardInterrupt):
        VERBS["rollback"](manager)
    assert (seen(manager), goes_on(manager)) == (seen(after), goes_on(after))


@pytest.mark.parametrize("meanwhile", ["nothing", "merged"])
def test_blocks_that_an_undone_verb_took_keep_their_place_in_their_text(meanwhile, monkeypatch):
    """The interrupted verb evicted the blocks and took them as later blocks of another text."""
    manager = pc.CacheManager(10, block_size=2, policy="lru")
    (pool,) = manager.pools
    manager.allocate("first", [0], reuse="anywhere")  # from now on published blocks are indexed
    manager.free("first")
    text = [10, 11, 12, 13, 14, 15]
    manager.allocate("a", text)
    manager.allocate("b", text)  # computes the same text, and will be given the blocks of "a"
    manager.commit("a", 6)
    manager.free("a")
    before = pool.prefix_length[pool.complete].tolist(), pool.taken_at[pool.complete].tolist()
    honest = pool.take

    def interrupted(*arguments, **options):
        honest(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.allocate("c", range(50, 64))
    monkeypatch.undo()
    assert (pool.prefix_length[pool.complete].tolist(), pool.taken_at[pool.complete].tolist()) == before
    if meanwhile == "merged":
        assert manager.commit("b", 6)
    (span,) = manager.allocate("n", [50, *text, 9], reuse="anywhere").moved
    assert (span.start, span.end, span.delta) == (1, 7, 1)
    manager.check()


AGAIN = [(one_group, "allocate"), (with_a_tier, "append_each"), (several_groups, "commit"), (one_group, "preempt")]


@pytest.mark.parametrize("stride", [61, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("build", "name"), AGAIN, ids=lambda value: getattr(value, "__name__", value))
def test_further_interrupts_while_the_first_is_undone(build, name, stride):
    """This includes an interrupt before the undoing begins: the next caller finds a consistent manager."""
    verb = (GROUPED if build is several_groups else VERBS)[name]
    before, after = build("lru"), build("lru")
    verb(after)
    states = [seen(before), seen(after)]
    number = 40
    while True:
        for further in ((1,), (2,), (3, 1, 1), (5, 30), (40, 40)):
            manager = build("lru")
            place = interrupt(manager, verb, number, *further)
            if place is None:
                return
            assert seen(manager) in states, f"half of {name} after interrupts at {place}"
            assert_usable(manager, place)
        number += stride


class StopError(BaseException):
    pass


def test_an_exception_of_another_thread_is_like_an_interrupt():
    """`PyThreadState_SetAsyncExc` raises between any two instructions of a verb."""
    manager, number, begun, stopped, failures = one_group("default"), 0, 0, [], []

    def work():
        nonlocal number, begun
        try:
            while True:
                number += 1
                manager.allocate(number, [number % 7] * 5 + [number])
                manager.append(number, [1, 2])
                manager.commit(number, 8)
                manager.free(number)
        except StopError:
            pass
        for name in range(begun, number + 1):
            ask(manager.free, name)
        manager.check()
        begun = number
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
