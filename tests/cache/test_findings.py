"""Former faults of the manager: tiers beside other threads, processes, pickled values, huge numbers."""

from __future__ import annotations

import copy
import os
import pickle
import threading

import numpy as np
import pytest
from cache_cases import Listener, published_by, run
from processes import exit_status_of_child

import pc


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_what_is_published_while_its_twin_is_saved_is_known(partial_reuse):
    manager = pc.CacheManager(2, block_size=2, partial_reuse=partial_reuse)
    listener = Listener()
    manager.listeners.append(listener)
    manager.allocate("computes", [1, 2])
    run(manager, "first", [1, 2])
    manager.on_evict = lambda *arguments: manager.commit("computes", 2)
    manager.allocate("other", [9, 9])
    manager.check()
    assert len(listener.published) == 1
    assert listener.published == published_by(manager)
    assert [event for event, *_ in listener.events] == ["stored", "removed", "stored"]
    manager.free("computes")
    if partial_reuse:
        manager.free("other")
        manager.on_evict = None
        assert manager.allocate("again", [1, 5]).num_cached_tokens == 1, "the index of beginnings knows it too"


@pytest.mark.parametrize(("window", "block_size"), [(1, 2), (3, 2), (17, 16), (2, 2), (16, 16), (4, 1)])
def test_append_keeps_what_the_last_prompt_token_reads_until_it_is_computed(window, block_size):
    manager = pc.CacheManager(16, block_size=block_size, groups=(pc.SlidingWindow(window=window),))
    prompt = list(range(4 * block_size))
    for name in ("first", "again"):
        allocation = manager.allocate(name, prompt)
        if name == "first":
            manager.commit(name, len(prompt))
            manager.free(name)
    last = len(prompt) - 1
    assert allocation.compute_spans == [(last, last + 1)]
    manager.append("again", [7])
    read = np.arange(max(0, last - window + 1), last + 1) // block_size
    assert (manager.block_table("again")[read] >= 0).all()
    manager.commit("again", last + 2)
    held = (manager.block_table("again") >= 0).sum()
    assert held == -(-(last + 2) // block_size) - max(0, last + 2 - window) // block_size, (
        "released once it is computed"
    )
    manager.check()


def test_a_tier_is_given_blocks_that_a_window_leaves_and_that_are_taken_at_once():
    manager = pc.CacheManager(4, block_size=1, groups=(pc.SlidingWindow(window=2),), policy="lru")
    run(manager, "cached", [5])
    manager.allocate("a", [1, 2, 3])
    manager.commit("a", 3)
    known, seen = manager.block_hashes("a"), []

    def takes(group, blocks, hashes):
        seen.extend(hashes)
        return hashes

    manager.on_evict = takes
    manager.append("a", [0, 1, 2])
    assert len(seen) == 3, "the two cached blocks and the one that the window has left"
    assert set(known[:2]) < set(seen)
    assert manager.stats().offloaded_blocks == 3
    manager.check()


def results():
    manager = pc.CacheManager(8, block_size=4)
    grouped = pc.CacheManager(8, block_size=4, groups=[pc.FullAttention(), pc.SlidingWindow(window=8)])
    for m in (manager, grouped):
        yield m.allocate("a", range(6), extra_keys=pc.KeyAt(2, "image"))
        yield m.append("a", [6])
        yield m.append_each(["a"], [7])
        yield m.stats()
    yield pc.OutOfBlocks(3, 1)
    yield pc.KeyAt(4, ("a", 1))
    yield from grouped.groups


@pytest.mark.parametrize("through", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_results_and_errors_can_be_pickled_and_copied(through):
    names = ("block_ids", "slot_mapping", "copies", "compute_spans", "requests", "positions", "needed", "available")
    for value in results():
        again = through(value)
        assert type(again) is type(value)
        assert str(again) == str(value)
        for name in names:
            assert str(getattr(again, name, None)) == str(getattr(value, name, None))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_process_beside_a_working_thread_has_a_whole_manager():
    manager, stop = pc.CacheManager(100, 4), threading.Event()

    def work():
        number = 0
        while not stop.is_set():
            number += 1
            run(manager, number, list(range(200)))

    def use():
        manager.check()
        manager.allocate("child", [7] * 20)
        manager.commit("child", 20)
        manager.check()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(8):
            assert exit_status_of_child(use) == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_process_holds_nothing_that_a_thread_was_saving():
    manager = pc.CacheManager(2, block_size=2)
    run(manager, "a", [1, 2, 3, 4])
    entered, leave = threading.Event(), threading.Event()
    manager.on_evict = lambda *_: (entered.set(), leave.wait(30))
    thread = threading.Thread(target=manager.allocate, args=("b", [9, 9]))
    thread.start()
    assert entered.wait(30)

    def free():
        manager.check()
        manager.free("b")
        assert (manager.stats().cached_blocks, manager.stats().free_blocks) == (1, 1)

    assert exit_status_of_child(free) == 0
    leave.set()
    thread.join()
    manager.check()
