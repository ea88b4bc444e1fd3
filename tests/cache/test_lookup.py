"""The cached part of a prompt: after gaps, in windows, and where there are states."""

from __future__ import annotations

from cache_cases import drop, recurrent, run, window_groups

import pc


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
    c = m.allocate("c", list(range(20)))
    assert c.num_cached_tokens == 19
    m.free("c")
    drop(m.pools[0], c.block_ids[2:3])
    whole = m.allocate("d", list(range(20)), reuse="gap")
    assert (whole.cached_spans, whole.compute_spans) == ([(0, 8), (12, 19)], [(8, 12), (19, 20)])
    m.check()


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
    """If a prompt is cached whole, its last token is computed again, and its window begins one token earlier."""
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
    a = run(m, "a", list(range(24)))
    drop(m.pools[0], a.block_ids[0][4:5])
    b = m.allocate("b", [*range(24), 1])
    assert b.num_cached_tokens == 16
    assert (b.block_ids[0][:4] == a.block_ids[0][:4]).all()
    assert b.block_ids[1][:4].tolist() == [-1, -1, *a.block_ids[1][2:4]]
    assert len(b.slot_mapping) == 2
    assert b.slot_mapping[0].size == b.slot_mapping[1].size == 9
    m.check()


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
    assert m.allocate("d", list(range(8))).num_cached_tokens == 0, "the state has seen the last token"
    m.check()


def test_no_state_jumps_over_a_gap():
    m = recurrent()
    table = m.allocate("a", list(range(16))).block_ids[0]
    for end in (8, 12, 16):
        m.checkpoint("a", end)
    m.commit("a", 16)
    m.free("a")
    drop(m.pools[0], table[:1])
    gap = m.allocate("b", [*range(16), 7], reuse="gap")
    assert (gap.cached_spans, gap.compute_spans) == ([], [(0, 17)])
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
