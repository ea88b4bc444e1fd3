"""Compressed prompts in vLLM's scheduler, over a model whose every row depends on all rows that are left before it."""

from __future__ import annotations

import logging
import math
import random

import pytest
from vllm_compressing import CompressingEngine, following_compressed
from vllm_exact import BLOCK, ENGINES, following, preempt, prompt, random_traffic
from vllm_traffic import make_request


def expected(engine, name, tokens, count):
    """What a request says, compressed or exact, as its plan has it in the end."""
    plan = engine.plans.get(name)
    if plan is None or not plan.is_compressed:
        return following(tokens, count)
    return following_compressed(tokens, count, plan.tokens, plan.keep)


def held(engine):
    return sum(block.ref_cnt > 0 for block in engine.scheduler.block_pool.blocks if not block.is_null)


def run_until_compressed(engine, name):
    while engine.plans[name].state == "waiting":
        engine.step()


@ENGINES
@pytest.mark.parametrize("budget", [0.2, 0.5, 0.9])
def test_tokens_and_blocks(kind, budget):
    engine, tokens = CompressingEngine(64, **kind), prompt(20 * BLOCK + 5)
    engine.add("one", tokens, 40, pc_compress=budget)
    run_until_compressed(engine, "one")
    assert held(engine) == math.ceil(budget * 20) + 1
    engine.run()
    assert engine.said["one"] == following_compressed(tokens, 40, len(tokens), math.ceil(budget * 20))
    counts = engine.scheduler.compression.counts
    assert (counts["compressed_requests"], counts["recompressed_requests"]) == (1, 0)
    assert counts["compression_freed_blocks"] == 20 - math.ceil(budget * 20)


@ENGINES
def test_until(kind):
    """Tokens after the compressed part see what is left of it."""
    engine, tokens = CompressingEngine(64, **kind), prompt(20 * BLOCK + 5)
    engine.add("one", tokens, 6, pc_compress={"budget": 0.5, "until": 10 * BLOCK + 7})
    engine.run()
    assert engine.said["one"] == following_compressed(tokens, 6, 10 * BLOCK, 5)


@ENGINES
def test_single_tokens_beside_cuda_graphs(kind, monkeypatch):
    """A step of single tokens replays a graph, which saves no queries. So no chunk with queries has one token."""
    monkeypatch.setattr("pc.integrations.vllm.compression.scheduler.replays_whole_steps", lambda *_: True)
    engine, asked = CompressingEngine(400, **kind, budget=40), {}
    engine.replays = True
    engine.add("answers", *asked.setdefault("answers", (prompt(5), 300)))
    for length in range(260, 300):  # 39 tokens of a step beside the answer, and 40 after it
        asked[str(length)] = prompt(length, length), 2
        engine.add(str(length), *asked[str(length)], pc_compress=0.3)
        run_until_compressed(engine, str(length))
        if length == 285:
            engine.run()
    engine.run()
    assert engine.said == {name: expected(engine, name, *each) for name, each in asked.items()}
    assert all(plan.is_compressed for plan in engine.plans.values())


@ENGINES
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(kind, seed):
    """Compressed and exact requests with common beginnings, hits, preemptions, aborts, evictions, 16 at once."""
    rng = random.Random(seed)
    engine = CompressingEngine(110, **kind, policy=rng.choice(["fifo", "lru"]))
    roots = [prompt(rng.randrange(300, 500), 100 + seed + at) for at in range(3)]

    def ask(asked):
        root = rng.choice(roots)
        tokens = root[: rng.randrange(200, len(root))] + prompt(rng.randrange(1, 40), rng.randrange(1 << 30))
        if rng.random() < 0.2 and asked:
            tokens = rng.choice(list(asked.values()))[0]
        options = {"budget": rng.choice([0.2, 0.5]), "until": rng.choice([None, rng.randrange(150, 400)])}
        return tokens, rng.randrange(1, 40), {"pc_compress": options} if rng.random() < 0.7 else {}

    asked = random_traffic(engine, rng, ask)
    assert len(asked) > 30
    assert engine.said == {name: expected(engine, name, *each) for name, each in asked.items()}
    compression = engine.scheduler.compression
    assert compression.counts["compressed_requests"] > 15
    assert not compression.plans
    assert not compression._peers
    assert {plan.is_compressed for plan in engine.plans.values()} >= {True, False}


@ENGINES
def test_equal_prompts_share_what_is_left(kind):
    """Four samples of one prompt hold its packed blocks once."""
    engine, tokens = CompressingEngine(64, **kind), prompt(20 * BLOCK + 5)
    for name in "abcd":
        engine.add(name, tokens, 30, pc_compress=0.5)
    for name in "abcd":
        run_until_compressed(engine, name)
    assert held(engine) == 10 + 4
    engine.run()
    assert engine.said == dict.fromkeys("abcd", following_compressed(tokens, 30, len(tokens), 10))


def test_shared_prompts_stay_exact():
    """Where requests share most of their blocks, compressing each would take more than it frees."""
    engine, root = CompressingEngine(64), prompt(20 * BLOCK)
    for number in range(4):
        engine.add(str(number), root + prompt(BLOCK, number + 1), 30, pc_compress=0.5)
        engine.step()
    while any(plan.state == "waiting" for plan in engine.plans.values()):
        engine.step()
    assert held(engine) <= 20 + 4 * 3
    engine.run()
    assert not any(plan.is_compressed for plan in list(engine.plans.values())[:3])


@ENGINES
@pytest.mark.parametrize("kept", [8, 7])
def test_all_wait_for_blocks_in_a_full_pool(kind, kept):
    """Requests that share their blocks, and among them fill the pool: the youngest is preempted, and all end.

    A request that would keep all its eight blocks is not compressed.
    """
    tokens = prompt(8 * BLOCK)
    engine = CompressingEngine(1 + 8 + 2 * 3, **kind)
    preempted = []
    stock = engine.scheduler._preempt_request
    engine.scheduler._preempt_request = lambda request, *args, **kwargs: (
        preempted.append(request.request_id),
        stock(request, *args, **kwargs),
    )
    for name in "abcd":
        engine.add(name, tokens, 3, pc_compress=kept / 8)
    for _ in range(200):
        if engine.scheduler.requests:
            engine.step()
    assert not engine.scheduler.requests
    assert engine.said == {name: expected(engine, name, tokens, 3) for name in "abcd"}
    assert preempted
    assert [plan.is_compressed for plan in engine.plans.values()] == [True] * 4 * (kept < 8)


def test_a_prefill_that_is_held_back_beside_requests_that_wait_for_blocks():
    """vLLM holds prefill back until decodes have run, and these wait for the blocks that the prefill will free."""
    engine, tokens, other = CompressingEngine(1 + 12 + 13, budget=320), prompt(10 * BLOCK), prompt(13 * BLOCK, 1)
    engine.scheduler.local_prefill_interval = 4
    for name in "ab":
        engine.add(name, tokens, 3, pc_compress=0.8)
    engine.add("other", other, 3)
    for _ in range(100):
        if engine.scheduler.requests:
            engine.step()
    assert not engine.scheduler.requests
    assert engine.said.pop("other") == following(other, 3)
    assert engine.said == {name: expected(engine, name, tokens, 3) for name in "ab"}


def test_a_request_that_waits_for_blocks_is_preempted():
    """The running request is not one that waits, so there is nothing to compress in its place."""
    engine, tokens = CompressingEngine(64, budget=320), prompt(10 * BLOCK)
    engine.add("exact", tokens, 20)
    waiting = engine.add("waiting", tokens[:-BLOCK], 3, pc_compress=0.5)
    engine.step()
    preempt(engine.scheduler, "waiting")
    engine.scheduler.compression._stalled, engine.scheduler.compression._stuck_steps = [waiting], 1
    engine.run()
    assert engine.said["exact"] == following(tokens, 20)


def test_an_answer_behind_a_compressed_prompt_is_never_published():
    """Else a later request would find KV that saw a part of the prompt."""
    engine, tokens = CompressingEngine(64), prompt(10 * BLOCK + 5)
    engine.add("one", tokens, 60, pc_compress=0.5)
    engine.run()
    longer = tokens + engine.said["one"]
    engine.add("two", longer, 4)
    engine.run()
    assert engine.said["two"] == following(longer, 4)
    assert engine.computed["two"] >= 60


def test_preempted_requests_are_compressed_again():
    engine, tokens = CompressingEngine(64), prompt(10 * BLOCK + 5)
    engine.add("one", tokens, 12, pc_compress=0.5)
    run_until_compressed(engine, "one")
    engine.step()
    preempt(engine.scheduler, "one")
    engine.run()
    assert engine.said["one"] == following_compressed(tokens, 12, len(tokens), 5)
    counts = engine.scheduler.compression.counts
    assert (counts["compressed_requests"], counts["recompressed_requests"]) == (2, 1)


@pytest.mark.parametrize("count", range(1, 12))
def test_a_compressed_request_is_compressed_again_when_others_end(count):
    """It waits for blocks of a request that is about to end, so it needs no exact prompt to continue."""
    engine, tokens = CompressingEngine(1 + 10 + 6, asynchronous=True), prompt(10 * BLOCK)
    engine.add("one", tokens, 20, pc_compress=0.8)
    run_until_compressed(engine, "one")
    for _ in range(5):
        engine.step()
    preempt(engine.scheduler, "one")
    engine.add("exact", tokens, count)
    engine.run()
    assert engine.said == {
        "one": following_compressed(tokens, 20, len(tokens), 8),
        "exact": following(tokens, count),
    }


@ENGINES
@pytest.mark.parametrize("turn", [6, 8, 9, 10])
def test_a_compressed_request_leaves_blocks_to_a_session(kind, turn):
    """A session has the prompt's exact blocks, and another session needs blocks for its next input.

    The compressed request can never be packed beside them. It waits without blocks of its own until a session ends.
    """
    engine, tokens, input_ = CompressingEngine(30, **kind), prompt(10 * BLOCK + 3), prompt(2 * BLOCK, 9)

    def session(name, tokens):
        request = make_request(name, tokens, BLOCK, None, 2, ignore_eos=True)
        request.resumable = True
        engine.said.setdefault(name, [])
        engine.scheduler.add_request(request)

    engine.add("one", tokens, 30, pc_compress=0.5)
    for _ in range(8):
        engine.step()
    session("same", tokens)
    session("other", prompt(turn * BLOCK + 3, 7))
    for _ in range(8):
        engine.step()
    preempt(engine.scheduler, "one")
    session("other", prompt((13 - turn) * BLOCK + 1, 8))
    for _ in range(20):
        engine.step()
    assert engine.plans["one"].state == "waiting"
    session("other", input_)
    for _ in range(20):
        engine.step()
    other = engine.scheduler.requests["other"]
    assert other.num_prompt_tokens == other.num_computed_tokens - 1 == 15 * BLOCK + 4 + 2
    engine.abort("other")
    for _ in range(60):
        engine.step()
    assert engine.said["one"] == following_compressed(tokens, 30, len(tokens), 5)


@ENGINES
def test_no_request_overtakes_a_preempted_one(kind):
    """Short requests that fit beside those that run wait behind it, or it would wait as long as they come."""
    engine, overtook = CompressingEngine(28, **kind), 0
    for number in (100, 101):
        engine.add(f"long {number}", prompt(3 * BLOCK + 3, number), 150)
        for _ in range(3):
            engine.step()
    engine.add("one", prompt(16 * BLOCK + 3), 60, pc_compress=0.5)
    requests, number = engine.scheduler.requests, 102
    for step in range(160):
        while "one" in requests and step > 30 and len(requests) < 13:
            engine.add(f"short {number}", prompt(3 * BLOCK + 3, number), 12 + 5 * (number % 5))
            number += 1
        running = {each.request_id for each in engine.scheduler.running}
        engine.step()
        now = {each.request_id for each in engine.scheduler.running}
        overtook += bool("one" in requests and requests["one"].num_preemptions and "one" not in now and now - running)
    assert overtook == 0


REFUSED = {
    "budgets below 32 tokens": (3 * BLOCK, {"pc_compress": 0.3}),
    "hidden states of each token": (10 * BLOCK, {"pc_compress": 0.5, "pc_hidden_states": True}),
    "fixed chunks": (10 * BLOCK, {"pc_compress": 0.5}),
    "an engine without PC_VLLM=compression": (10 * BLOCK, {"pc_compress": 0.5}),
    "budget: got 2, needs more than 0 and at most 1": (10 * BLOCK, {"pc_compress": 2}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_stays_exact(warnings, reason):
    length, extra = REFUSED[reason]
    engine = CompressingEngine(64, more={"pc_chunk": str(2 * BLOCK)} if reason == "fixed chunks" else None)
    if reason.startswith("an engine"):
        del engine.scheduler.vllm_config.model_config.pc_cannot_compress
    if reason.startswith("hidden states"):
        engine.scheduler.vllm_config.parallel_config.worker_cls = "HiddenStatesWorker"
    for name in ("one", "two"):
        engine.add(name, prompt(length), 4, **extra)
    engine.run()
    assert engine.said == dict.fromkeys(("one", "two"), following(prompt(length), 4))
    assert reason in warnings[-1]
    assert len(warnings) == (2 if reason.startswith("budget:") else 1)


def test_requests_that_do_not_ask_are_what_they_were():
    """Hits, jumps and blocks of a request beside a compressed one are those without it."""

    def run(**extra):
        engine, tokens = CompressingEngine(128), prompt(20 * BLOCK + 5)
        engine.add("first", tokens)
        engine.run()
        engine.add("other", prompt(12 * BLOCK, 5), 20, **extra)
        engine.add("second", tokens, 20)
        engine.run()
        return engine.said["second"], engine.computed["second"]

    assert run() == run(pc_compress=0.5)


SHARED = {"budget": 0.5, "until": 12 * BLOCK + 3}


@ENGINES
def test_packed_blocks_are_found_again(kind):
    """A later question about the same text computes its own tokens alone, and says what it would have said."""
    engine, text = CompressingEngine(64, **kind), prompt(12 * BLOCK)
    for name in "ab":
        engine.add(name, text + prompt(20, ord(name)), 8, pc_compress=SHARED)
        engine.run()
        assert engine.said[name] == following_compressed(text + prompt(20, ord(name)), 8, 12 * BLOCK, 6)
    assert engine.computed["b"] - engine.computed["a"] == -12 * BLOCK
    assert engine.scheduler.compression.counts["compressed_requests"] == 2


def test_questions_at_once_hold_a_text_once():
    engine, text = CompressingEngine(64), prompt(12 * BLOCK)
    engine.add("first", text + prompt(20), 2, pc_compress=SHARED)
    engine.run()
    for number in range(8):
        engine.add(str(number), text + prompt(8, number), 30, pc_compress=SHARED)
    while any(engine.plans[str(number)].state != "compressed" for number in range(8)):
        engine.step()
    assert held(engine) == 6 + 8
    engine.run()
    assert engine.said["7"] == following_compressed(text + prompt(8, 7), 30, 12 * BLOCK, 6)


def test_what_does_not_find_packed_blocks():
    """Another budget, press, text, salt or wish to share; requests that do not ask; and any block of them evicted."""
    engine, text = CompressingEngine(160), prompt(12 * BLOCK)
    engine.add("first", text + prompt(20), 2, pc_compress=SHARED)
    engine.run()
    other = [text[0] + 1, *text[1:]]
    cases = {
        "budget": (text, None, SHARED | {"budget": 0.6}),
        "press": (text, None, SHARED | {"press": "knorm"}),
        "private": (text, None, SHARED | {"share": False}),
        "text": (other, None, SHARED),
        "salt": (text, "salt", SHARED),
        "exact": (text, None, None),
    }
    for name, (tokens, salt, options) in cases.items():
        extra = {"pc_compress": options} if options else {}
        engine.add(name, tokens + prompt(20, 5), 4, salt, **extra)
        if engine.plans.get(name) and options.get("press") == "knorm":
            engine.plans[name].options = engine.plans["first"].options  # this engine has one press
        engine.run()
        assert engine.said[name] == expected(engine, name, tokens + prompt(20, 5), 4)
        assert engine.computed[name] >= (32 if options else 0) + 20 + 3
    keys = engine.plans["first"].keys
    pool = engine.scheduler.block_pool
    pool.evict_blocks({pool.cached_block_hash_to_block.get_one_block(keys[3]).block_id})
    engine.add("evicted", text + prompt(20, 6), 4, pc_compress=SHARED)
    engine.run()
    assert engine.said["evicted"] == following_compressed(text + prompt(20, 6), 4, 12 * BLOCK, 6)
    assert engine.computed["evicted"] >= 32 + 20 + 3


def test_events_of_packed_blocks():
    """Consumers are told of packed blocks as of a kind of their own, and when they are evicted."""
    engine = CompressingEngine(64)
    pool = engine.scheduler.block_pool
    pool.enable_kv_cache_events, events, take = True, [], pool.take_events
    pool.take_events = lambda: events.extend(take()) or events
    engine.add("first", prompt(12 * BLOCK + 20), 2, pc_compress=SHARED)
    engine.run()
    stored = [each for each in events if getattr(each, "kv_cache_spec_kind", None) == "pc_compressed"]
    assert [len(each.block_hashes) for each in stored] == [6]
    pool.evict_blocks({pool.cached_block_hash_to_block.get_one_block(engine.plans["first"].keys[0]).block_id})
    assert pool.kv_event_queue[-1].block_hashes == stored[0].block_hashes[:1]


def test_a_miss_is_explained_by_compression(logged):
    """The exact blocks of a prompt were freed by its compression, so an exact request finds fewer."""
    said = logged(logging.INFO)
    engine, tokens = CompressingEngine(12), prompt(10 * BLOCK + 5)
    engine.add("one", tokens, 6, pc_compress=0.5, pc_explain=True)
    engine.run()
    engine.add("two", tokens, 2, pc_explain=True)
    engine.run()
    assert engine.said["two"] == following(tokens, 2)
    lines = [line for line in said if line.startswith("request two")]
    assert "was freed when its prompt was compressed" in lines[0]


def test_an_answer_behind_a_compressed_prompt_is_not_known_as_exact(logged):
    """It was never in the cache, so its blocks were not evicted."""
    said = logged(logging.INFO)
    engine, tokens = CompressingEngine(64), prompt(10 * BLOCK + 5)
    engine.add("one", tokens, 40, pc_compress=0.5, pc_explain=True)
    engine.run()
    engine.add("two", tokens + engine.said["one"], 2, pc_explain=True)
    engine.run()
    lines = [line for line in said if line.startswith("request two")]
    assert (
        "160 of 205 tokens are cached: only whole blocks are found, and 5 tokens of the block of token 160" in lines[0]
    )
