"""Preempted requests, which are computed again or loaded from host memory."""

from __future__ import annotations

import pytest
from cache_cases import run

import pc


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


def evict_all(manager):
    """Fill every pool with other blocks."""
    run(manager, "evict", [9] * (manager.block_size * min(pool.num_blocks for pool in manager.pools)))


def swapped(groups, tokens, host_blocks, ahead=1):
    """Return a request whose last token is not computed, after swapping it out and in with all else evicted."""
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
