"""The contract of CacheManager, one fact a test."""

from __future__ import annotations

import numpy as np
import pytest

import pc


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
    m.pools[0].drop(middle)
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
