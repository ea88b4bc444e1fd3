"""Explanations of misses in vLLM's log: each cause and its token, as `CacheManager.explain` gives them."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
from vllm_exact import BLOCK, ExactEngine

FIRST = random.Random(1).choices(range(3, 1000), k=10 * BLOCK + 5)


@pytest.fixture
def lines(logged):
    """Return the explanations in the log."""
    return logged(logging.INFO)


@pytest.fixture
def engine(lines):
    """An engine that has computed a first prompt and remembers it."""
    engine = ExactEngine(100)
    engine.add("first", FIRST, pc_explain=True)
    engine.run()
    assert lines.pop().startswith(f"request first: 0 of {len(FIRST)} tokens are cached: nothing like it was seen")
    return engine


def ask(engine, lines, tokens, **options):
    engine.add("asked", tokens, pc_explain=True, **options)
    engine.run()
    line = lines.pop()
    assert line.startswith("request asked: ")
    return line.removeprefix("request asked: ")


def test_another_token(engine, lines):
    other = [*FIRST[:70], 1, *FIRST[71:]]
    reason = f"token 70 is 1, but {FIRST[70]} in the longest matching text"
    assert ask(engine, lines, other).startswith(f"64 of {len(FIRST)} tokens are cached: {reason}")


def test_another_salt(engine, lines):
    assert ask(engine, lines, FIRST, salt="mine").endswith("from token 0 on the same text is cached under another salt")


def test_another_adapter(engine, lines):
    request = engine.add("asked", FIRST, pc_explain=True)
    request.lora_request = SimpleNamespace(lora_name="adapter", lora_path="there")
    request.block_hashes.clear()
    request.update_block_hashes()
    found = engine.scheduler._misses.explain(request, None)
    assert (found.matched, found.reason, found.position) == (0, "keys", 0)
    assert found.here == (("adapter", "there"),)


def test_an_image(engine, lines):
    request = engine.add("asked", FIRST, pc_explain=True)
    position = SimpleNamespace(offset=40, length=4)
    request.mm_features = [SimpleNamespace(mm_position=position, identifier="an image")]
    request.block_hashes[2:] = [bytes([at]) * 32 for at in range(len(request.block_hashes) - 2)]
    found = engine.scheduler._misses.explain(request, None)
    assert (found.matched, found.reason, found.position, found.here) == (32, "keys", 40, "an image")


def test_evicted_and_what_gaps_would_save(engine, lines):
    pool, hashes = engine.scheduler.block_pool, engine.add("other", FIRST).block_hashes
    pool.evict_blocks({pool.get_cached_block(hashes[at], [0])[0].block_id for at in (3, 4)})
    engine.abort("other")
    line = ask(engine, lines, FIRST)
    assert line.startswith(f"48 of {len(FIRST)} tokens are cached: the block of token 48 was evicted; more would be")
    assert "80 over gaps" in line


def test_the_rest_of_a_block(engine, lines):
    line = ask(engine, lines, FIRST[: 5 * BLOCK + 9])
    assert line.endswith("only whole blocks are found, and 9 tokens of the block of token 80 agree")


def test_one_that_waits_has_the_same(engine, lines):
    new = random.Random(5).choices(range(3, 1000), k=200)
    engine.add("waits", new)
    found = engine.scheduler._misses.explain(engine.add("asked", new), None)
    assert (found.matched, found.reason, found.there) == (0, "uncommitted", "waits")


def test_what_moved_text_would_save(lines):
    engine = ExactEngine(100, reuse="anywhere")
    engine.add("first", FIRST, pc_explain=True)
    engine.run()
    line = ask(engine, lines, [1, 2, 3, *FIRST])
    assert line.startswith(f"0 of {len(FIRST) + 3} tokens are cached: ")
    assert "anywhere" in line


def test_requests_that_do_not_ask_get_no_explanation(lines):
    engine = ExactEngine(100)
    engine.add("first", FIRST)
    engine.run()
    assert engine.scheduler._misses is None
    assert not any("tokens are cached" in line for line in lines)


def test_a_window_that_lacks_its_blocks_says_so():
    from vllm_traffic import BLOCK, make_manager, make_request

    from pc.integrations.vllm.eviction.explaining import Misses, why_not_explained

    manager, tokens = make_manager(60, hybrid=True), list(range(6 * BLOCK))
    scheduler = SimpleNamespace(
        kv_cache_manager=manager, kv_cache_config=manager.kv_cache_config, requests={}, hash_block_size=BLOCK,
        compression=None,
    )  # fmt: skip
    first = make_request("first", tokens)
    blocks, hits, *_ = manager.get_computed_blocks(first)
    assert manager.allocate_slots(first, len(tokens) - hits, hits, blocks) is not None
    first.num_computed_tokens = len(tokens)
    assert why_not_explained(scheduler) == ""
    misses = Misses(scheduler)
    misses.remember(first)
    manager.free(first)
    again = make_request("again", [*tokens, 1, 2])
    found = misses.explain(again, None)
    assert (found.matched, manager.get_computed_blocks(again)[1]) == (24, 24)
    pool, windows = manager.block_pool, [1, 2]
    for name in again.block_hashes:
        for block in filter(None, [pool.get_cached_block(name, [group]) for group in windows]):
            pool.evict_blocks({block[0].block_id})
    found = misses.explain(again, None)
    assert (found.matched, found.reason, manager.get_computed_blocks(again)[1]) == (0, "window", 0)
    kinds = [(miss.kind, miss.matched, miss.reason) for miss in found.groups]
    assert kinds[0] == ("FullAttention", 24, None)
    assert kinds[1:] == [("SlidingWindow", 0, "evicted")] * 2
