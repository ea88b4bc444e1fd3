"""Text that is found at another position: what is found, with which hashes, and which calls raise."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import run

import pc

BLOCK = 4
TEXT = list(range(100, 124))


def make(num_blocks=64, **options):
    """Return a manager that has TEXT after four other tokens.

    Blocks published before the first search are not found.
    """
    manager = pc.CacheManager(num_blocks, BLOCK, **options)
    store(manager, "text", [*range(4), *TEXT])
    return manager


def store(manager, name, tokens, **options):
    run(manager, name, tokens, reuse="anywhere", **options)


def positions(allocation):
    return [(span.start, span.end, span.delta) for span in allocation.moved]


@pytest.mark.parametrize("lead", [0, 1, 3, 4, 9])
def test_text_of_any_alignment_is_found_and_extended_to_both_sides(lead):
    manager = make()
    prompt = [*range(50, 50 + lead), *TEXT[2:21], 7]
    allocation = manager.allocate("n", prompt, reuse="anywhere")
    assert positions(allocation) == [(lead, lead + 19, lead - 6)]
    (span,) = allocation.moved
    table, source = manager.block_table("n"), range(6, 25)
    assert span.slots.tolist() == list(source)  # "text" has blocks 0 to 6
    assert span.targets.tolist() == [int(table[p // BLOCK]) * BLOCK + p % BLOCK for p in range(lead, lead + 19)]
    spans = sorted([*allocation.compute_spans, (span.start, span.end)])
    assert [p for start, end in spans for p in range(start, end)] == list(range(len(prompt)))
    assert len(allocation.slot_mapping) == sum(end - start for start, end in allocation.compute_spans)
    manager.check()


@pytest.mark.quick
@pytest.mark.parametrize("size", [*range(1, 41), 48, 64, 80, 96, 128, 160, 192])
def test_text_is_found_with_every_block_size(size):
    manager, text = pc.CacheManager(64, size), np.random.default_rng(size).integers(0, 50000, 10 * size).tolist()
    store(manager, "text", [1, *text, 2])
    found = manager.allocate("n", [7, 8, 9, *text, 3], reuse="anywhere").moved
    assert sum(span.end - span.start for span in found) > 9 * size - 2


def test_the_last_token_is_computed():
    allocation = make().allocate("n", [9, *TEXT], reuse="anywhere")
    assert positions(allocation) == [(1, 24, -3)]
    assert allocation.compute_spans == [(0, 1), (24, 25)]


def test_pieces_in_another_order_are_spans_of_their_own():
    manager = make()
    allocation = manager.allocate("n", [*TEXT[12:], *TEXT[:12], 7], reuse="anywhere")
    assert positions(allocation) == [(0, 12, -16), (12, 24, 8)]
    assert allocation.recompute_moved(0.25).tolist() == [0, 1, 2, 12, 13, 14]
    assert allocation.recompute_moved(0).size == 0
    assert allocation.recompute_moved(1).tolist() == list(range(24))


def test_exact_blocks_come_first_and_approximate_ones_are_read_by_their_kind_alone():
    manager = make()
    prompt = [*range(4), 77, *TEXT, 5, 6, 7, 8]
    first = manager.allocate("a", prompt, reuse="anywhere")
    assert first.cached_spans == [(0, 4)]
    assert first.approximate_from == 4
    manager.commit("a", len(prompt))
    manager.free("a")
    for reuse in ("prefix", "gap"):
        assert manager.allocate(reuse, prompt, reuse=reuse).cached_spans == [(0, 4)]
        manager.free(reuse)
    again = manager.allocate("b", [*prompt, 9], reuse="anywhere")
    assert again.cached_spans == [(0, 32)]
    assert again.approximate_from == 4
    assert not again.moved


def test_keys_and_salts_are_not_crossed():
    manager = make()
    store(manager, "other", TEXT, salt="s")
    for options in ({"salt": "t"}, {"extra_keys": "lora"}, {"extra_keys": pc.KeyAt(20, "image")}):
        assert not manager.allocate("n", [9, *TEXT, 7], reuse="anywhere", **options).moved
        manager.free("n")
    assert manager.allocate("n", [9, *TEXT, 7], reuse="anywhere", salt="s").moved[0].delta == 1


def test_the_blocks_of_moved_text_are_held_until_commit():
    manager = make(num_blocks=14)
    prompt = [9, *TEXT, 7]
    allocation = manager.allocate("n", prompt, reuse="anywhere")
    held = set((allocation.moved[0].slots // BLOCK).tolist())
    with pytest.raises(pc.OutOfBlocks):
        manager.allocate("m", range(500, 512))
    manager.commit("n", len(prompt))
    assert held & set(manager.allocate("m", range(500, 512)).block_ids.tolist())
    manager.check()


def test_text_that_cannot_be_held_is_computed():
    manager = make(num_blocks=8)
    allocation = manager.allocate("n", [9, *TEXT, 7], reuse="anywhere")
    assert allocation.compute_spans == [(0, 26)]


def test_segments_limit_what_is_found():
    manager = make()
    prompt = [9, *TEXT, 7]
    options = {"reuse": "anywhere", "segments": [(3, 9), (9, 11), (13, 22)]}
    assert positions(manager.allocate("n", prompt, **options)) == [(3, 9, -3), (13, 22, -3)]


def test_a_prompt_in_parts_gets_what_has_blocks():
    manager = make()
    allocation = manager.allocate("n", [9, *TEXT, 7], reuse="anywhere", num_tokens=10)
    assert positions(allocation) == [(1, 10, -3)]
    assert manager.append("n", [*TEXT[9:], 7]).compute_spans == [(10, 26)]


def test_memory_is_counted_and_bounded():
    manager = pc.CacheManager(1024, 16)
    assert manager.stats().index_bytes == 0
    store(manager, "first", range(64))
    held = manager.stats().index_bytes
    assert 0 < held < 1024 * 256 + (1 << 18)
    for number in range(50):
        store(manager, number, np.arange(640) + 1000 * number)
    assert manager.stats().index_bytes == held


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_a_reset_forgets_the_text_of_blocks(partial_reuse):
    manager = make(partial_reuse=partial_reuse)
    manager.reset()
    allocation = manager.allocate("n", [*range(4), *TEXT[:3], 7], reuse="anywhere")
    assert (allocation.num_cached_tokens, allocation.moved, allocation.copies) == (0, [], [])
    assert not manager.allocate("m", [9, *TEXT, 7], reuse="anywhere").moved


def test_moved_tokens_are_counted():
    manager = make()
    manager.allocate("n", [9, *TEXT, 7], reuse="anywhere")
    stats = manager.stats()
    assert (stats.moved_tokens, stats.hit_tokens) == (24, 0)


def test_bad_shares():
    allocation = make().allocate("n", [9, *TEXT, 7], reuse="anywhere")
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"fraction: got .*, needs 0 to 1"):
            allocation.recompute_moved(share)
    with pytest.raises(TypeError, match="fraction: got str, needs a number from 0 to 1"):
        allocation.recompute_moved("all")
