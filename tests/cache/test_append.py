"""Growing requests: forks that share a block, chunks of a prompt, hints, and many requests at once."""

from __future__ import annotations

import random

import pytest
from cache_cases import recurrent, run

import pc
from pc.cache.policies.priority import Priority


def test_tokens_that_are_not_committed_cannot_be_forked():
    manager = pc.CacheManager(8, block_size=4)
    manager.allocate("p", [1, 2, 3, 4, 5, 6])
    manager.commit("p", 5)
    with pytest.raises(ValueError, match="request_id: got 'p' with 5 of 6 tokens committed, needs all"):
        manager.fork("p", "c")
    assert manager.stats().num_requests == 1
    manager.commit("p", 6)
    manager.fork("p", "c")
    manager.append("p", [7])
    with pytest.raises(ValueError, match="request_id: got 'p' with 6 of 7"):
        manager.fork("p", "d")
    manager.check()


def test_the_first_to_append_to_a_shared_block_copies_it_and_the_last_goes_on_in_place():
    manager = pc.CacheManager(8, block_size=4)
    manager.allocate("p", [1, 2, 3, 4, 5, 6])
    manager.commit("p", 6)
    shared = int(manager.block_table("p")[1])
    for child in ("c", "d"):
        manager.fork("p", child)
    for name in ("d", "p"):
        step = manager.append(name, [7, 8])
        assert step.copies == [(shared, int(manager.block_table(name)[1]))]
        assert step.compute_spans == [(6, 8)]
    assert manager.append("c", [9]).copies == []
    assert manager.block_table("c")[1] == shared
    manager.check()


@pytest.mark.parametrize("groups", [None, [pc.FullAttention(), pc.SlidingWindow(window=5)]], ids=["one", "two"])
def test_append_each_succeeds_just_where_separate_appends_do(groups):
    outcomes = []
    for seed in range(150):
        r = random.Random(seed)
        managers = [pc.CacheManager(r.randrange(3, 9), 4, policy="lru", groups=groups) for _ in range(2)]
        managers[1] = pc.CacheManager(managers[0].pools[0].num_blocks, 4, policy="lru", groups=groups)
        names = ["a"]
        length = r.randrange(1, 10)
        forks = r.randrange(4)
        try:
            for m in managers:
                m.allocate("a", list(range(length)))
                m.commit("a", length)
                for i in range(forks):
                    m.fork("a", i)
        except pc.OutOfBlocks:
            continue
        names += range(forks)
        for _ in range(6):
            one_by_one = True
            try:
                for name in names:
                    managers[0].append(name, [5])
            except pc.OutOfBlocks:
                one_by_one = False
            try:
                managers[1].append_each(names, [5] * len(names))
                together = True
            except pc.OutOfBlocks:
                together = False
            assert together == one_by_one, seed
            outcomes.append(together)
            for m in managers:
                m.check()
            if not together:
                break
    assert {True, False} <= set(outcomes)


def test_a_fork_has_the_next_tokens_of_its_prompt_and_no_state_that_is_not_written():
    manager = recurrent()
    manager.allocate("a", list(range(12)), num_tokens=8)
    manager.commit("a", 8)
    manager.checkpoint("a", 4)
    manager.fork("a", "b")
    assert manager.block_table("b", 1).tolist() == [-1, -1]
    with pytest.raises(ValueError, match="not the next ones of the prompt"):
        manager.append("b", [99])
    manager.check()


def test_a_table_grows_in_few_steps(manager):
    manager.allocate("a", [])
    sizes = set()
    for token in range(64):
        manager.append_each(["a"], [token])
        sizes.add(manager._state.running["a"].tables[0].size)
    assert len(sizes) < 4, "a table that grows is copied"


def test_a_step_can_be_made_of_appended_tokens():
    manager = pc.CacheManager(8, block_size=4)
    for name in "ab":
        manager.allocate(name, [1, 2, 3])
    got = manager.append_each(["a", "b"], [7, 8])
    step = pc.Step({}, got.slot_mapping, got.requests, got.query_start_loc, got.positions)
    assert step.extents == ([0, 1, 2], [4, 4], False)
    assert got.positions.tolist() == [3, 3]


def test_a_prompt_takes_blocks_in_chunks():
    manager = pc.CacheManager(8, block_size=4)
    prompt = list(range(18))
    a = manager.allocate("a", prompt, num_tokens=6)
    assert (a.compute_spans, a.block_ids.size, manager.num_tokens("a")) == ([(0, 6)], 2, 6)
    manager.commit("a", 6)
    with pytest.raises(ValueError, match="not the next ones of the prompt"):
        manager.append("a", [99])
    b = manager.append("a", prompt[6:13])
    assert (b.compute_spans, b.block_ids.size) == ([(6, 13)], 2)
    for wrong in (lambda: manager.append("a", [99]), lambda: manager.append_each(["a"], [99])):
        with pytest.raises(ValueError, match="not the next one"):
            wrong()
    manager.append_each(["a"], prompt[13:14])
    manager.commit("a", 14)
    with pytest.raises(ValueError, match="not the next ones of the prompt"):
        manager.append("a", [99])
    manager.append("a", [*prompt[14:], 50])
    manager.commit("a", 19)
    manager.free("a")
    assert manager.allocate("b", [*prompt, 50]).num_cached_tokens == 16
    manager.check()


def test_an_append_of_no_tokens_needs_no_block():
    """Formerly it copied a shared block of a prompt in chunks, and raised OutOfBlocks if no block was free."""
    manager = pc.CacheManager(2, block_size=4)
    manager.allocate("a", range(6), num_tokens=3)
    manager.commit("a", 3)
    manager.fork("a", "b")
    manager.allocate("c", [9])
    assert not manager.append("a", []).copies
    assert manager.block_table("a").tolist() == manager.block_table("b").tolist() == [0]
    manager.free("c")
    assert manager.append("a", [3]).copies == [(0, 1)]


def test_windows_release_what_a_chunk_has_passed():
    """A prompt of many blocks fits into a window's pool of a few blocks."""
    groups = [pc.FullAttention(), pc.SlidingWindow(window=5, num_blocks=4)]
    manager = pc.CacheManager(16, block_size=4, groups=groups)
    prompt = list(range(40))
    with pytest.raises(pc.OutOfBlocks):
        manager.allocate("a", prompt)
    manager.allocate("a", prompt, num_tokens=8)
    for done in range(8, 40, 8):
        manager.commit("a", done)
        assert manager.block_table("a", 1)[done // 4 - 2] < 0, "the next chunk does not read it"
        manager.append("a", prompt[done : done + 8])
        manager.check()
    manager.commit("a", 40)
    assert manager.num_tokens("a") == 40


def hit_after_traffic(manager, tokens):
    for other in (8, 9):
        manager.allocate(other, [other] * 8)
        manager.commit(other, 8)
        manager.free(other)
    return manager.allocate("again", tokens).num_cached_tokens


def test_hints_reach_generated_blocks_and_survive_preemption_and_forks():
    for how in ("append", "append_each", "resume", "fork"):
        manager = pc.CacheManager(4, block_size=4, policy=Priority())
        manager.allocate("p", [1] * 4, priority=5)
        name = "p"
        if how == "append_each":
            for token in [2, 2, 2, 2]:
                manager.append_each(["p"], [token])
        else:
            manager.append("p", [2] * 4)
        if how == "resume":
            manager.preempt("p")
            manager.resume("p")
        if how == "fork":
            manager.commit("p", 8)
            manager.fork("p", "child")
            manager.free("p")
            name = "child"
            assert manager._state.running["child"].hint == (5, None)
        manager.commit(name, 8)
        manager.free(name)
        assert hit_after_traffic(manager, [1] * 4 + [2] * 4) == 7, how
        manager.check()


def test_preempting_what_is_computed_whole_keeps_what_its_last_token_reads():
    manager = pc.CacheManager(8, block_size=3, groups=[pc.SlidingWindow(window=3)], host_blocks=4, policy="lru")
    manager.allocate("a", list(range(5)))
    manager.commit("a", 5)
    assert len(manager.preempt("a", "swap")) == 2
    run(manager, "b", [9] * 24)
    back = manager.resume("a")
    assert (back.compute_spans, len(back.loads)) == ([(4, 5)], 2)
    manager.check()
