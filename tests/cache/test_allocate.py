"""Starting requests: cached tokens, tokens to compute, and room for them."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import run
from calls import calls_within

import pc


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


def test_one_token_block_hit():
    m = pc.CacheManager(4, block_size=1)
    run(m, "a", [5])
    a = m.allocate("b", [5])
    assert (a.num_cached_tokens, a.cached_spans, a.compute_spans) == (0, [], [(0, 1)])
    assert a.slot_mapping.tolist() == [-1]
    m.check()


def test_wait_for_names_the_request_that_is_computing(manager):
    manager.allocate("a", list(range(12)))
    manager.commit("a", 4)
    b = manager.allocate("b", [*range(8), 1, 1])
    assert b.num_cached_tokens == 4
    assert b.wait_for == "a"
    assert manager.allocate("c", [7, 7, 7, 7]).wait_for is None


def test_hit_blocks_are_not_counted_as_room():
    m = pc.CacheManager(4, block_size=4)
    run(m, "a", list(range(16)))
    with pytest.raises(pc.OutOfBlocks):
        m.allocate("b", list(range(17)))
    assert m.allocate("c", list(range(16))).num_cached_tokens == 15
    m.check()


def test_empty_prompt_holds_nothing_until_it_grows(manager):
    a = manager.allocate("a", [])
    assert (a.num_cached_tokens, a.compute_spans, a.slot_mapping.size, a.block_ids.size) == (0, [], 0, 0)
    assert manager.append("a", [1]).block_ids.size == 1


@pytest.mark.parametrize("cached", [48, 64])
def test_an_allocate_that_hits_takes_few_calls(cached):
    """Short prompts take as long as their function calls: at most 31 of Python, without numpy's own."""
    m = pc.CacheManager(4096, policy="lru")
    prefix = list(range(16 * cached))
    run(m, "a", prefix)
    run(m, "b", [*prefix[: 16 * 48], *range(5000, 5256)])
    prompt = [*prefix, *range(9000, 10024 - len(prefix))]
    allocation, calls = calls_within(lambda: m.allocate("c", prompt))
    assert allocation.num_cached_tokens == min(16 * cached, 1023)
    assert len(calls) <= 31, calls


class Odd:
    """An id whose n-th comparison fails. All have the same hash, so that a dict must compare them."""

    left = 1 << 30

    def __hash__(self):
        return 5

    def __eq__(self, other):
        Odd.left -= 1
        if not Odd.left:
            raise ArithmeticError
        return self is other


@pytest.mark.parametrize("verb", ["allocate", "fork"])
def test_an_id_that_fails_to_be_compared_costs_nothing(manager, verb):
    ids, failed = [Odd(), Odd()], 0
    manager.allocate(ids[0], list(range(9)))
    manager.commit(ids[0], 9)
    calls = {"allocate": lambda: manager.allocate(ids[1], list(range(9))), "fork": lambda: manager.fork(*ids)}
    for times in range(1, 9):
        Odd.left = times
        try:
            calls[verb]()
        except ArithmeticError:
            failed += 1
        else:
            Odd.left = 1 << 30
            manager.free(ids[1])
        Odd.left = 1 << 30
        manager.check()
        assert (manager.stats().num_requests, manager.stats().held_blocks) == (1, 3)
    assert failed >= 2
    manager.free(ids[0])


def test_an_id_that_does_not_equal_itself_serves(manager):
    name = float("nan")
    assert manager.allocate(name, list(range(9))).wait_for is None
    manager.check()
    assert manager.allocate("b", list(range(9))).wait_for is name
    manager.free("b")
    manager.commit(name, 9)
    manager.check()
    manager.free(name)
    assert manager.stats().held_blocks == 0
