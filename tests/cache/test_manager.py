"""The contract of CacheManager, one fact a test."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import drop

import pc
from pc.cache.policies import POLICIES


@pytest.fixture
def manager():
    m = pc.CacheManager(16, block_size=4, policy="lru")
    yield m
    m.check()


def run(manager, request_id, tokens, **options):
    """A request from start to end."""
    allocation = manager.allocate(request_id, tokens, **options)
    manager.commit(request_id, len(tokens))
    manager.free(request_id)
    return allocation


def test_first_prompt_computes_everything(manager):
    a = manager.allocate("a", range(10))
    assert a.num_cached_tokens == 0
    assert a.cached_spans == []
    assert a.compute_spans == [(0, 10)]
    assert a.block_ids.dtype == np.int32
    assert len(set(a.block_ids.tolist())) == 3
    assert a.slot_mapping.dtype == np.int64
    expected = [int(a.block_ids[t // 4]) * 4 + t % 4 for t in range(10)]
    assert a.slot_mapping.tolist() == expected
    assert a.copies == []
    assert a.wait_for is None


def test_prefix_is_found_after_free(manager):
    first = run(manager, "a", list(range(10)))
    second = manager.allocate("b", [*range(8), 99, 98, 97])
    assert second.num_cached_tokens == 8
    assert second.compute_spans == [(8, 11)]
    assert second.block_ids[:2].tolist() == first.block_ids[:2].tolist()


def test_partial_block_is_not_found(manager):
    run(manager, "a", list(range(10)))
    assert manager.allocate("b", list(range(10))).num_cached_tokens == 8


def test_whole_hit_recomputes_only_the_last_token_without_writing(manager):
    run(manager, "a", list(range(8)))
    a = manager.allocate("b", list(range(8)))
    assert a.num_cached_tokens == 7
    assert a.cached_spans == [(0, 7)]
    assert a.compute_spans == [(7, 8)]
    assert a.slot_mapping.tolist() == [-1]
    assert a.block_ids.size == 2


def test_one_token_block_hit():
    m = pc.CacheManager(4, block_size=1)
    run(m, "a", [5])
    a = m.allocate("b", [5])
    assert (a.num_cached_tokens, a.cached_spans, a.compute_spans) == (0, [], [(0, 1)])
    assert a.slot_mapping.tolist() == [-1]
    m.check()


def test_uncommitted_blocks_are_not_findable(manager):
    manager.allocate("a", list(range(8)))
    assert manager.allocate("b", list(range(8))).num_cached_tokens == 0
    manager.free("a")
    manager.free("b")
    assert manager.allocate("c", list(range(8))).num_cached_tokens == 0
    assert manager.stats().cached_blocks == 0


def test_commit_of_a_part_makes_only_whole_blocks_findable(manager):
    manager.allocate("a", list(range(12)))
    manager.commit("a", 7)
    assert manager.allocate("b", list(range(12))).num_cached_tokens == 4


def test_wait_for_names_the_request_that_is_computing(manager):
    manager.allocate("a", list(range(12)))
    manager.commit("a", 4)
    b = manager.allocate("b", [*range(8), 1, 1])
    assert b.num_cached_tokens == 4
    assert b.wait_for == "a"
    assert manager.allocate("c", [7, 7, 7, 7]).wait_for is None


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
    b = manager.allocate("b", list(range(8)))
    manager.commit("b", 8)
    manager.free("b")
    assert manager.commit("a", 8) != []
    assert manager.block_table("a").tolist() == b.block_ids.tolist()


def test_decode_blocks_become_findable(manager):
    manager.allocate("a", [0, 1, 2])
    manager.commit("a", 3)
    for token in range(3, 9):
        manager.append("a", [token])
        manager.commit("a", token + 1)
    manager.free("a")
    assert manager.allocate("b", list(range(9))).num_cached_tokens == 8


def test_append_gives_slots_of_the_new_tokens(manager):
    manager.allocate("a", [0, 1, 2])
    step = manager.append("a", [3, 4])
    table = manager.block_table("a")
    assert step.slot_mapping.tolist() == [table[0] * 4 + 3, table[1] * 4]
    assert step.block_ids.tolist() == [table[1]]
    assert step.compute_spans == [(3, 5)]


def test_lru_evicts_oldest_release_first_and_tail_first():
    m = pc.CacheManager(4, block_size=4, policy="lru")
    run(m, "a", list(range(8)))
    run(m, "b", [9] * 8)
    run(m, "c", [7] * 4)
    assert m.allocate("d", list(range(8))).num_cached_tokens == 4
    m.free("d")
    assert m.allocate("e", [9] * 8).num_cached_tokens == 4
    m.check()


def test_out_of_blocks_changes_nothing(manager):
    run(manager, "a", list(range(20)))
    manager.allocate("b", [1] * 40)
    before = manager.stats()
    with pytest.raises(pc.OutOfBlocks, match="needs 11 blocks"):
        manager.allocate("c", [*range(4), *[3] * 44])
    with pytest.raises(pc.OutOfBlocks):
        manager.append("b", [1] * 100)
    assert manager.stats() == before
    assert manager.allocate("d", list(range(20))).num_cached_tokens == 19


def test_hit_blocks_are_not_counted_as_room():
    m = pc.CacheManager(4, block_size=4)
    run(m, "a", list(range(16)))
    with pytest.raises(pc.OutOfBlocks):
        m.allocate("b", list(range(17)))
    assert m.allocate("c", list(range(16))).num_cached_tokens == 15
    m.check()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"salt": "x"}, {"salt": "y"}),
        ({"salt": "x"}, {}),
        ({"extra_keys": "lora"}, {}),
        ({"extra_keys": ["a", "b"]}, {"extra_keys": ["ab"]}),
        ({"extra_keys": ["1"]}, {"extra_keys": [1]}),
        ({"extra_keys": pc.KeyAt(0, "image")}, {}),
        ({"extra_keys": pc.KeyAt(0, "image")}, {"extra_keys": pc.KeyAt(1, "image")}),
        ({"extra_keys": "x"}, {"salt": "x"}),
    ],
    ids=str,
)
def test_keys_and_salts_keep_requests_apart(manager, one, two):
    run(manager, "a", list(range(8)), **one)
    assert manager.allocate("b", list(range(8)), **two).num_cached_tokens == 0
    assert manager.allocate("c", list(range(8)), **one).num_cached_tokens == 7


def test_text_before_an_image_is_shared(manager):
    run(manager, "a", list(range(12)), extra_keys=pc.KeyAt(5, "image"))
    assert manager.allocate("b", list(range(12)), extra_keys=pc.KeyAt(6, "other")).num_cached_tokens == 4


@pytest.mark.parametrize("kind", [list, tuple, range, np.array, lambda t: np.array(t, np.int32)])
def test_kinds_of_token_ids_are_the_same_prompt(manager, kind):
    run(manager, "a", list(range(8)))
    tokens = range(8) if kind is range else kind(list(range(8)))
    assert manager.allocate("b", tokens).num_cached_tokens == 7


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([-1], ValueError),
        ([1 << 32], ValueError),
        (["x"], TypeError),
        ([1.5], TypeError),
        ("abc", TypeError),
        (np.array([-1]), ValueError),
        (np.array([1.5]), TypeError),
        (np.zeros((2, 2), int), TypeError),
        (3, TypeError),
    ],
)
def test_bad_tokens_are_refused_by_name(manager, tokens, error):
    with pytest.raises(error, match="token_ids"):
        manager.allocate("a", tokens)
    assert manager.stats().num_requests == 0


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
    "hint", [{"priority": "x"}, {"priority": 1.5}, {"ttl": "x"}, {"ttl": -1.0}, {"ttl": float("nan")}]
)
def test_a_bad_hint_changes_nothing(hint):
    m = pc.CacheManager(4, block_size=4, policy="priority")
    with pytest.raises((TypeError, ValueError), match=next(iter(hint))):
        m.allocate("a", [1], **hint)
    m.check()
    assert m.stats().num_requests == 0


@pytest.mark.parametrize("value", [1.0, "1", None])
def test_positions_are_integers(manager, value):
    manager.allocate("a", [1, 2])
    for call in (manager.commit, manager.rollback):
        with pytest.raises(TypeError, match="num_tokens"):
            call("a", value)
    manager.commit("a", np.int64(2))
    manager.rollback("a", np.int64(1))


def test_fork_copies_the_shared_partial_block_on_write(manager):
    manager.allocate("a", list(range(6)))
    manager.commit("a", 6)
    manager.fork("a", "b")
    shared = manager.block_table("a")
    step = manager.append("b", [9])
    table = manager.block_table("b")
    assert step.copies == [(shared[1], table[1])]
    assert table[0] == shared[0]
    assert step.slot_mapping.tolist() == [table[1] * 4 + 2]
    assert manager.append("a", [8]).copies == []
    assert manager.block_table("a").tolist() == shared.tolist()


def test_rollback_gives_blocks_back_and_new_tokens_get_their_own_identity(manager):
    manager.allocate("a", list(range(8)))
    manager.rollback("a", 3)
    assert manager.block_table("a").size == 2
    manager.append("a", [50, 51, 52])
    manager.commit("a", 8)
    manager.free("a")
    assert manager.allocate("b", list(range(8))).num_cached_tokens == 4
    assert manager.allocate("c", [*range(5), 50, 51, 52]).num_cached_tokens == 7


def test_rollback_into_a_findable_block_never_overwrites_it(manager):
    a = manager.allocate("a", list(range(8)))
    manager.commit("a", 8)
    manager.rollback("a", 1)
    step = manager.append("a", [99])
    assert step.copies == [(a.block_ids[1], manager.block_table("a")[1])]
    manager.commit("a", 8)
    assert manager.allocate("b", list(range(8))).num_cached_tokens == 7
    assert manager.allocate("c", [*range(7), 99]).num_cached_tokens == 7


def test_gap_reuse_lists_what_is_left_to_compute():
    m = pc.CacheManager(6, block_size=4, policy="lru")
    a = m.allocate("a", list(range(20)))
    m.commit("a", 20)
    middle = a.block_ids[2:3]
    m.free("a")
    drop(m.pools[0], middle)
    b = m.allocate("b", [*range(20), 77], reuse="gap")
    assert b.cached_spans == [(0, 8), (12, 20)]
    assert b.compute_spans == [(8, 12), (20, 21)]
    assert b.num_cached_tokens == 16
    table = b.block_ids
    assert b.slot_mapping.tolist() == [*range(table[2] * 4, table[2] * 4 + 4), table[5] * 4]
    m.commit("b", 21)
    m.free("b")
    assert m.allocate("c", list(range(20))).num_cached_tokens == 19
    m.check()


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


def test_empty_prompt_holds_nothing_until_it_grows(manager):
    a = manager.allocate("a", [])
    assert (a.num_cached_tokens, a.compute_spans, a.slot_mapping.size, a.block_ids.size) == (0, [], 0, 0)
    assert manager.append("a", [1]).block_ids.size == 1


def test_stats_count_tokens_and_blocks(manager):
    run(manager, "a", list(range(10)))
    manager.allocate("b", list(range(10)))
    s = manager.stats()
    assert (s.queried_tokens, s.hit_tokens, s.hit_rate) == (20, 8, 0.4)
    assert (s.free_blocks, s.cached_blocks, s.held_blocks, s.num_blocks) == (13, 0, 3, 16)
    assert {type(value) for value in vars(s).values()} == {int, dict, tuple}


def test_append_each_is_append_for_each():
    one, many = (pc.CacheManager(64, block_size=4, policy="lru") for _ in range(2))
    for m in (one, many):
        for i in range(5):
            m.allocate(i, [i] * (i + 2))
            m.commit(i, i + 2)
        m.fork(4, "child")
    for step in range(6):
        ids = [0, 1, 2, 3, 4, "child"]
        slots, copies = many.append_each(ids, [step] * 6)
        single = [one.append(i, [step]) for i in ids]
        assert copies == [pair for a in single for pair in a.copies]
        assert slots.tolist() == [int(a.slot_mapping[0]) for a in single]
        assert [many.block_table(i).tolist() for i in ids] == [one.block_table(i).tolist() for i in ids]
        many.check()
    empty, none = many.append_each([], [])
    assert (empty.size, none) == (0, [])


def test_append_each_that_fails_changes_nothing():
    m = pc.CacheManager(4, block_size=4)
    for i in range(3):
        m.allocate(i, [i] * 4)
    with pytest.raises(pc.OutOfBlocks):
        m.append_each([0, 1], [9, 9])
    assert [m.block_table(i).size for i in range(3)] == [1, 1, 1]
    with pytest.raises(ValueError, match="twice"):
        m.append_each([0, 0], [9, 9])
    with pytest.raises(ValueError, match="token_ids"):
        m.append_each([0], [9, 9])
    with pytest.raises(KeyError):
        m.append_each([0, 7], [9, 9])
    assert m.append(0, [9]).block_ids.size == 1
    m.check()


def window_groups(**options):
    return [pc.FullAttention(), pc.SlidingWindow(window=8, **options)]


def test_window_blocks_are_released_while_the_request_runs():
    m = pc.CacheManager(16, block_size=4, groups=[pc.SlidingWindow(window=8, num_sink_tokens=3)])
    m.allocate("a", list(range(24)))
    m.commit("a", 24)
    table = m.block_table("a")
    assert (table[0] >= 0, (table[1:4] < 0).all(), (table[4:] >= 0).all()) == (True, True, True)
    assert m.stats().held_blocks == 3
    m.check()


def test_a_window_moves_with_every_token_and_keeps_what_the_last_one_reads():
    m = pc.CacheManager(16, block_size=4, groups=[pc.SlidingWindow(window=6)])
    m.allocate("a", [1])
    m.commit("a", 1)
    for position in range(1, 24):
        m.append("a", [1])
        m.commit("a", position + 1)
        held = (m.block_table("a") >= 0).nonzero()[0].tolist()
        assert held == list(range(max(0, position - 5) // 4, position // 4 + 1))


def test_a_window_hit_needs_only_the_last_blocks_and_the_sinks():
    m = pc.CacheManager(16, block_size=4, groups=[pc.SlidingWindow(window=8, num_sink_tokens=3)], policy="lru")
    table = m.allocate("a", list(range(24))).block_ids
    m.commit("a", 24)
    m.free("a")
    drop(m.pools[0], table[2:3])
    hit = m.allocate("b", [*range(24), 1])
    assert hit.num_cached_tokens == 24
    assert hit.block_ids[:6].tolist() == [table[0], -1, -1, -1, table[4], table[5]]
    m.free("b")
    drop(m.pools[0], table[0:1])
    assert m.allocate("c", [*range(24), 1]).num_cached_tokens == 0
    m.check()


def test_the_recomputed_last_token_needs_its_own_window():
    """A prompt that is cached whole computes its last token again, whose window begins one token earlier."""
    m = pc.CacheManager(16, block_size=4, groups=[pc.SlidingWindow(window=5)], policy="lru")
    table = m.allocate("a", list(range(12))).block_ids
    m.commit("a", 12)
    m.free("a")
    drop(m.pools[0], table[:1])
    assert m.allocate("b", list(range(12))).num_cached_tokens == 11
    m.free("b")
    drop(m.pools[0], table[1:2])
    assert m.allocate("c", [*range(12), 1]).num_cached_tokens == 12
    m.free("c")
    assert m.allocate("d", list(range(12))).num_cached_tokens == 0
    m.check()


def test_a_hit_is_what_all_groups_can_serve():
    m = pc.CacheManager(16, block_size=4, groups=window_groups(), policy="lru")
    a = m.allocate("a", list(range(24)))
    m.commit("a", 24)
    m.free("a")
    drop(m.pools[0], a.block_ids[0][4:5])
    b = m.allocate("b", [*range(24), 1])
    assert b.num_cached_tokens == 16
    assert (b.block_ids[0][:4] == a.block_ids[0][:4]).all()
    assert b.block_ids[1][:4].tolist() == [-1, -1, *a.block_ids[1][2:4]]
    assert len(b.slot_mapping) == 2
    assert b.slot_mapping[0].size == b.slot_mapping[1].size == 9
    m.check()


def recurrent(num_blocks=16, **options):
    return pc.CacheManager(
        num_blocks, block_size=4, groups=[pc.FullAttention(), pc.Recurrent()], policy="lru", **options
    )


def test_a_state_is_found_only_where_one_was_left():
    m = recurrent()
    m.allocate("a", list(range(12)))
    assert m.block_table("a", group=1).tolist() == [-1, -1, -1], "a prompt takes no block for states"
    block = m.checkpoint("a", 8)
    assert m.checkpoint("a", 8) == block
    assert m.commit("a", 12) == [[], []]
    m.free("a")
    b = m.allocate("b", list(range(12)))
    assert (b.num_cached_tokens, b.junction) == (8, 12)
    assert b.block_ids[1].tolist() == [-1, block, -1]
    assert [slots.tolist() for slots in b.slot_mapping][1] == [-1] * 4
    assert m.allocate("c", [*range(6), 9, 9, 9]).num_cached_tokens == 0, "KV of one block, and no state"
    m.check()


def test_a_junction_is_where_only_the_state_is_missing():
    m = recurrent()
    m.allocate("a", list(range(16)))
    m.commit("a", 16)
    b = m.allocate("b", [*range(8), 50, 51, 52])
    assert (b.num_cached_tokens, b.junction) == (0, 8)
    m.checkpoint("b", b.junction)
    m.commit("b", 11)
    c = m.allocate("c", [*range(8), 60, 61])
    assert (c.num_cached_tokens, c.junction) == (8, None)
    assert pc.CacheManager(4, block_size=4).allocate("x", [1]).junction is None
    m.check()


def test_a_state_is_not_findable_before_the_commit_that_passes_it():
    m = recurrent()
    m.allocate("a", list(range(12)))
    m.checkpoint("a", 8)
    m.commit("a", 7)
    assert m.allocate("b", list(range(12))).num_cached_tokens == 0
    m.commit("a", 8)
    assert m.allocate("c", list(range(12))).num_cached_tokens == 8
    m.checkpoint("a", 4)  # also of a position behind: the next commit publishes it
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


def test_bad_checkpoints_are_refused_by_name():
    m = recurrent(4)
    m.allocate("a", list(range(10)))
    for position in (0, 6, 12, -4):
        with pytest.raises(ValueError, match="num_tokens"):
            m.checkpoint("a", position)
    with pytest.raises(TypeError, match="num_tokens"):
        m.checkpoint("a", 4.0)
    for group in (0, 2):
        with pytest.raises(ValueError, match="group"):
            m.checkpoint("a", 4, group)
    plain = pc.CacheManager(4, block_size=4)
    plain.allocate("a", [1, 2, 3, 4])
    with pytest.raises(ValueError, match="group"):
        plain.checkpoint("a", 4)


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


def test_a_request_whose_state_is_not_there_cannot_be_forked():
    m = recurrent()
    m.allocate("a", list(range(6)))
    with pytest.raises(ValueError, match="committed"):
        m.fork("a", "b")
    m.commit("a", 6)
    m.fork("a", "b")
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


def test_rollback_cannot_bring_back_what_left_the_window():
    m = pc.CacheManager(8, block_size=4, groups=[pc.SlidingWindow(window=4)])
    m.allocate("a", list(range(16)))
    m.commit("a", 16)
    with pytest.raises(ValueError, match="left the window"):
        m.rollback("a", 2)
    m.rollback("a", 1)
    m.check()


def test_requests_from_many_threads():
    """The thread-safety statement of CacheManager: every method is atomic."""
    import threading

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


def test_swap_brings_back_what_was_evicted_meanwhile():
    m = pc.CacheManager(4, block_size=4, policy="lru", host_blocks=8)
    a = m.allocate("a", list(range(14)))
    m.commit("a", 14)
    pairs = m.preempt("a", mode="swap")
    assert [block for block, _ in pairs] == a.block_ids.tolist()
    run(m, "b", [9] * 16)
    back = m.resume("a")
    assert back.loads == [(slot, int(b)) for (_, slot), b in zip(pairs, back.block_ids, strict=True)]
    assert (back.cached_spans, back.compute_spans, back.slot_mapping.tolist()) == ([(0, 13)], [(13, 14)], [-1])
    assert m.stats().host_blocks == 4
    m.commit("a", 14)
    assert m.stats().host_blocks == 0
    m.free("a")
    assert m.allocate("c", list(range(13))).num_cached_tokens == 12, "what came back is findable after commit"
    m.check()


def test_swap_with_a_full_host_loses_nothing():
    m = pc.CacheManager(4, block_size=4, policy="lru", host_blocks=2)
    m.allocate("a", list(range(14)))
    m.commit("a", 14)
    assert len(m.preempt("a", mode="swap")) == 2
    run(m, "b", [9] * 16)
    back = m.resume("a")
    assert (len(back.loads), back.compute_spans) == (2, [(8, 14)])
    m.preempt("a")
    m.check()
    assert m.resume("a").loads == []
    m.free("a")
    assert m.stats().host_blocks == 0
    m.check()


def test_a_preempted_request_keeps_its_place_when_there_is_no_room():
    m = pc.CacheManager(4, block_size=4, policy="lru", host_blocks=4)
    m.allocate("a", list(range(14)))
    m.commit("a", 14)
    m.preempt("a", mode="swap")
    m.allocate("b", [9] * 16)
    with pytest.raises(pc.OutOfBlocks):
        m.resume("a")
    with pytest.raises(ValueError, match="request_id"):
        m.allocate("a", [1])
    with pytest.raises(KeyError):
        m.append("a", [1])
    m.check()
    m.free("b")
    assert len(m.resume("a").loads) == 4
    m.check()


def test_the_victim_is_the_youngest_of_the_lowest_priority():
    m = pc.CacheManager(8, block_size=4)
    assert m.victim() is None
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", 2)):
        m.allocate(name, [1], priority=priority)
    assert m.victim() == "c"


def test_the_part_a_block_has_in_common_is_copied():
    m = pc.CacheManager(8, block_size=4, policy="lru", partial_reuse=True)
    a = run(m, "a", list(range(8)))
    b = m.allocate("b", [0, 1, 2, 3, 4, 5, 90, 91, 92])
    assert b.copies == [(a.block_ids[1], b.block_ids[1])]
    assert (b.cached_spans, b.compute_spans) == ([(0, 6)], [(6, 9)])
    assert b.slot_mapping.tolist() == [b.block_ids[1] * 4 + 2, b.block_ids[1] * 4 + 3, b.block_ids[2] * 4]
    assert m.stats().hit_tokens_by_cause == {"prefix": 4, "gap": 0, "partial": 2}
    m.commit("b", 9)
    m.free("b")
    assert m.allocate("c", [0, 1, 2, 3, 4, 5, 90, 91]).num_cached_tokens == 7
    m.check()


def test_a_partial_hit_respects_salts_images_and_the_last_token():
    m = pc.CacheManager(16, block_size=4, policy="lru", partial_reuse=True)
    run(m, "a", [1, 2, 3, 4], salt="x")
    assert m.allocate("b", [1, 2, 3, 9]).num_cached_tokens == 0
    assert m.allocate("c", [1, 2, 3, 9], salt="x").num_cached_tokens == 3
    assert m.allocate("d", [1, 2, 3], salt="x").num_cached_tokens == 2
    assert m.allocate("e", [1, 2, 3, 9], salt="x", extra_keys=pc.KeyAt(0, "image")).num_cached_tokens == 0
    m.check()


def test_the_source_of_a_partial_hit_is_not_evicted_for_it():
    m = pc.CacheManager(3, block_size=4, policy="lru", partial_reuse=True)
    a = run(m, "a", list(range(4)))
    b = m.allocate("b", [0, 1, 50, 51, 52])
    assert b.copies == [(a.block_ids[0], b.block_ids[0])]
    assert a.block_ids[0] not in b.block_ids
    m.free("b")
    run(m, "e", [77] * 8)
    c = m.allocate("c", [0, 1, 60, 61, 62, 63, 64, 65, 66])
    assert (c.copies, c.num_cached_tokens) == ([], 0), "its source has to go"
    m.check()
    m.free("c")
    m.reset()
    with pytest.raises(ValueError, match="partial_reuse"):
        pc.CacheManager(4, partial_reuse=True, groups=[pc.SlidingWindow(window=4)])


def test_a_swapped_block_is_loaded_and_not_copied_from_one_that_begins_like_it():
    manager = pc.CacheManager(num_blocks=8, block_size=4, host_blocks=4, partial_reuse=True)
    manager.allocate("swapped", [1, 1])
    manager.commit("swapped", 2)
    manager.allocate("alike", [1, 0, 0, 0])
    manager.commit("alike", 4)
    manager.free("alike")
    assert manager.preempt("swapped", "swap")
    allocation = manager.resume("swapped")
    assert len(allocation.loads) == 1
    assert not allocation.copies


def evict_all(manager):
    """Fills every pool with something else."""
    run(manager, "evict", [9] * (manager.block_size * min(pool.num_blocks for pool in manager.pools)))


def swapped(groups, tokens, host_blocks, ahead=1):
    """A request whose last token is not computed yet, swapped out and back with all else evicted meanwhile."""
    manager = pc.CacheManager(8, block_size=4, policy="lru", groups=groups, host_blocks=host_blocks)
    manager.allocate("a", list(range(tokens)))
    manager.commit("a", tokens)
    if ahead:
        manager.append("a", [7] * ahead)
    pairs = manager.preempt("a", "swap")
    manager.check()
    evict_all(manager)
    allocation = manager.resume("a")
    manager.check()
    manager.commit("a", tokens + ahead)
    assert manager.stats().host_blocks == 0
    manager.free("a")
    manager.check()
    return pairs, allocation


def test_swap_of_a_window_takes_only_what_is_read_again():
    pairs, back = swapped([pc.SlidingWindow(window=6, num_sink_tokens=2)], 22, 8)
    assert len(pairs) == 3, "the sink's block and those of positions 17 to 21"
    assert [slot for slot, _ in back.loads] == [slot for _, slot in pairs]
    assert (back.cached_spans, back.compute_spans) == ([(0, 22)], [(22, 23)])
    assert back.block_ids.tolist() == [back.loads[0][1], -1, -1, -1, back.loads[1][1], back.loads[2][1]]
    assert back.slot_mapping.tolist() == [back.loads[2][1] * 4 + 2]


def test_swap_of_several_groups_goes_back_to_the_last_state():
    m = pc.CacheManager(
        8, 4, policy="lru", groups=[pc.FullAttention(), pc.SlidingWindow(window=6), pc.Recurrent()], host_blocks=6
    )
    m.allocate("a", list(range(22)))
    m.checkpoint("a", 20)
    m.commit("a", 22)
    pairs = m.preempt("a", "swap")
    assert [len(p) for p in pairs] == [5, 2, 1]
    evict_all(m)
    back = m.resume("a")
    assert [len(p) for p in back.loads] == [5, 2, 0], "no prompt takes the place of a state"
    assert back.compute_spans == [(20, 22)]
    m.commit("a", 22)
    m.free("a")
    m.check()


def test_groups_go_on_together_from_where_all_slots_suffice():
    pairs, back = swapped([pc.FullAttention(), pc.SlidingWindow(window=6)], 22, 4)
    assert [len(p) for p in pairs] == [4, 2], "behind block 4: all of the one, two of the other that are still cached"
    assert back.compute_spans == [(16, 23)]


def test_without_a_slot_for_its_state_nothing_of_a_request_is_swapped():
    pairs, back = swapped([pc.FullAttention(), pc.Recurrent()], 22, 0)
    assert (pairs, back.loads, back.compute_spans) == ([[], []], [[], []], [(0, 23)])


def test_a_recurrent_request_goes_back_only_to_where_its_state_is():
    manager = pc.CacheManager(8, block_size=4, groups=[pc.Recurrent()])
    manager.allocate("a", list(range(10)))
    manager.checkpoint("a", 8)
    manager.commit("a", 10)
    with pytest.raises(ValueError, match="state"):
        manager.rollback("a", 1)
    manager.append("a", [1, 2])
    with pytest.raises(ValueError, match="state"):
        manager.rollback("a", 1)  # tokens that a forward pass may have seen
    manager.rollback("a", 2)
    assert manager.num_tokens("a") == 10
    manager.check()


def test_a_recurrent_request_goes_back_to_a_state_that_it_holds():
    manager = pc.CacheManager(8, block_size=4, groups=[pc.Recurrent()])
    manager.allocate("a", list(range(9)))
    manager.checkpoint("a", 8)
    manager.commit("a", 9)
    manager.rollback("a", 1)
    assert manager.num_tokens("a") == 8
    with pytest.raises(ValueError, match="state"):
        manager.rollback("a", 4)
    manager.check()


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
