"""Moved text in vLLM's scheduler: which text is found, and that no other request reads approximate KV."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from vllm_exact import BLOCK, ENGINES, ExactEngine, following, pinned_by, prompt, random_traffic

from pc.integrations.vllm.eviction.moved import LEAD


def run(engine, name, tokens, **extra):
    request = engine.add(name, tokens, **extra)
    engine.run()
    return request


@ENGINES
def test_a_marker_in_the_head(kind):
    """Everything after the marker is found in three turns, because text that a turn moved is found by the next."""
    engine = ExactEngine(120, **kind, reuse="anywhere")
    text = prompt(300)
    assert run(engine, "turn 0", prompt(20, 1) + text).num_output_tokens == 4
    for turn in range(1, 4):
        more = prompt(40, 10 + turn)
        run(engine, f"turn {turn}", prompt(20 + turn, 1 + turn) + text + more)
        start = 20 + turn
        end = start + len(text)
        assert engine.moved[f"turn {turn}"][0] - LEAD in range(start, start + BLOCK)
        assert engine.moved[f"turn {turn}"][-1] >= end - BLOCK
        # Each boundary between passes may cost the first tokens of another piece.
        assert engine.computed[f"turn {turn}"] <= start + 40 + 2 * BLOCK + LEAD + 3
        text += more
    assert engine.scheduler.jumps.counts["moved_tokens"] == sum(map(len, engine.moved.values()))
    assert not pinned_by(engine.scheduler.jumps)


def test_short_turns_are_one_piece():
    """Each turn's text is in another request's blocks; together they need first tokens only once, and one step."""
    engine, text = ExactEngine(300, reuse="anywhere", budget=1000), prompt(200)
    for turn in range(8):
        text += prompt(50, 10 + turn)
        run(engine, f"turn {turn}", prompt(20, 100 + turn) + text)
        if turn:
            assert engine.computed[f"turn {turn}"] <= 20 + LEAD + 50 + BLOCK + 3
            assert len(engine.moved[f"turn {turn}"]) >= len(text) - 50 - BLOCK - LEAD


def test_documents_in_another_order_are_pieces_of_their_own():
    """The first tokens after another document are computed, although no token is between the documents."""
    engine, one, other = ExactEngine(300, reuse="anywhere", budget=1000), prompt(160, 1), prompt(160, 2)
    run(engine, "first", one + other)
    run(engine, "second", other + one)
    assert engine.computed["second"] == 2 * LEAD + 1 + 3
    assert engine.moved["second"] == [*range(LEAD, 160), *range(160 + LEAD, 319)]


@ENGINES
def test_others_never_read_it(kind):
    """The same prompt follows at once. Requests for prefixes and gaps give the answer of an uncached prompt."""
    engine = ExactEngine(200, **kind)
    text = prompt(300)
    engine.add("ask", prompt(40, 2), pc_reuse="anywhere")
    run(engine, "first", prompt(20, 1) + text)
    tokens = prompt(37, 2) + text + prompt(50, 3)
    for name in ("moved", "again"):
        run(engine, name, tokens, pc_reuse="anywhere")
        assert len(engine.moved[name]) > 200
        assert engine.said[name] != following(tokens, 4), "moved KV is read, else this shows nothing"
    answer = tokens + engine.said["moved"]
    for name, asked, given in [("gap", "gap", tokens), ("prefix", "prefix", tokens), ("on", "gap", answer * 2)]:
        run(engine, name, given, pc_reuse=asked)
        assert engine.said[name] == following(given, 4)
        assert name not in engine.moved
    assert engine.computed["gap"] >= len(tokens) - 37 - 2 * LEAD, "what two have computed in front of moved text alone"


@ENGINES
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(kind, seed):
    """Evictions, aborts, preemptions, chunks, 16 at once; exact requests run beside those with moved text."""
    rng = random.Random(seed)
    policy = rng.choice(["fifo", "default"])
    engine = ExactEngine(140, **kind, policy=policy)
    roots = [prompt(rng.randrange(200, 400), 100 + seed + at) for at in range(3)]
    exact = []

    def ask(asked):
        root, cut, at = rng.choice(roots), rng.randrange(0, 60), rng.randrange(60, 150)
        tokens = root[: rng.choice([0, 100])] + prompt(rng.randrange(1, 40), rng.randrange(1 << 30)) + root[cut:]
        tokens = (tokens[:at] + rng.choice(roots)[:150] + tokens[at:])[: rng.randrange(200, 500)]
        reuse = rng.choice(["prefix", "gap", "anywhere", "anywhere"])
        if reuse != "anywhere":
            exact.append(f"r{len(asked)}")
        return tokens, rng.randrange(1, 30), {"pc_reuse": reuse, "salt": rng.choice([None, None, "salt"])}

    asked = random_traffic(engine, rng, ask)
    expected = {name: following(*asked[name]) for name in exact if name in asked}
    assert len(expected) > 10
    assert {name: engine.said[name] for name in expected} == expected
    assert engine.moved
    assert engine.scheduler.jumps.counts["moved_tokens"] > 1000
    assert not engine.moved.keys() & expected.keys()
    assert not pinned_by(engine.scheduler.jumps)


@pytest.mark.parametrize(
    "apart", [{"salt": "other"}, {"lora": "adapter"}, {"media": True}, {"embeds": True}, {"pc_hidden_states": True}]
)
def test_other_salts_adapters_and_images_are_not_found(apart):
    """No text is moved for requests whose KV depends on more, or whose rows cannot be moved."""
    engine, text = ExactEngine(200, reuse="anywhere"), prompt(300)
    run(engine, "first", prompt(20, 1) + text)

    def add(name, tokens, of):
        request = engine.add(name, tokens, **{key: of[key] for key in of if key in ("salt", "pc_hidden_states")})
        request.lora_request = SimpleNamespace(lora_name=of["lora"], lora_path="") if "lora" in of else None
        request.prompt_embeds = object() if "embeds" in of else None
        media = SimpleNamespace(mm_position=SimpleNamespace(offset=0, length=1), identifier="i")
        return request, [media] if "media" in of else []

    index = engine.scheduler.jumps
    own, request_media = add("apart", prompt(37, 2) + text, apart)
    own.mm_features = request_media
    assert not index.plan(own, 0, anywhere=True)
    same, _ = add("same", prompt(39, 2) + text, {})
    assert index.plan(same, 0, anywhere=True)


def test_text_in_blocks_of_others_is_found_only_once_it_is_written():
    """Two requests with the same text are in one step. The second finds nothing to copy yet, and computes."""
    engine, text = ExactEngine(200, reuse="anywhere", budget=1000), prompt(200)
    engine.add("one", prompt(20, 1) + text)
    engine.add("two", prompt(23, 2) + text)
    engine.run()
    assert not engine.moved
    assert engine.said["two"] == following(prompt(23, 2) + text, 4)


def test_evicted_and_refilled_blocks_are_not_found():
    engine, text = ExactEngine(40, reuse="anywhere"), prompt(300)
    run(engine, "first", prompt(20, 1) + text)
    run(engine, "others", prompt(38 * BLOCK, 5))
    tokens = prompt(25, 2) + text
    run(engine, "moved", tokens)
    assert "moved" not in engine.moved
    assert engine.said["moved"] == following(tokens, 4)


def test_sources_that_do_not_fit_beside_a_request_are_computed():
    """A request never waits for blocks that only it has pinned."""
    engine, text = ExactEngine(36, reuse="anywhere"), prompt(320)
    run(engine, "first", prompt(20, 1) + text)
    run(engine, "moved", prompt(25, 2) + text, generate=30)
    assert len(engine.said["moved"]) == 30
    assert 0 < len(engine.moved.get("moved", range(1))) < 200


def test_exact_gaps_come_first():
    """Later runs at the same position are reused as they are. Text between them is moved."""
    engine, tokens = ExactEngine(200, reuse="anywhere"), prompt(40 * BLOCK + 5)
    request = run(engine, "first", tokens)
    run(engine, "copy", prompt(7, 1) + tokens[8 * BLOCK : 20 * BLOCK])
    pool = engine.scheduler.block_pool
    at = [*range(8, 20)]
    pool.evict_blocks({pool.get_cached_block(request.block_hashes[n], [0])[0].block_id for n in at})
    run(engine, "again", tokens)
    assert engine.scheduler.jumps.counts["jumped_tokens"] == 20 * BLOCK
    assert engine.moved["again"]
    assert set(engine.moved["again"]) <= set(range(8 * BLOCK + LEAD, 20 * BLOCK))
    assert engine.computed["again"] < 3 * BLOCK + LEAD + 8


@ENGINES
def test_moved_text_before_a_run_may_wait_for_tokens(kind):
    """The moved text ends with a block. Then another request takes all tokens of two steps."""
    engine, tokens, other = ExactEngine(200, **kind, reuse="anywhere"), prompt(40 * BLOCK + 5), prompt(10 * BLOCK, 1)
    gaps = {run(engine, "first", tokens): range(8, 20), run(engine, "other", other): range(2, 3)}
    run(engine, "copy", prompt(BLOCK, 2) + tokens[8 * BLOCK : 16 * BLOCK] + prompt(BLOCK, 3))
    pool = engine.scheduler.block_pool
    for request, gap in gaps.items():
        pool.evict_blocks({pool.get_cached_block(request.block_hashes[n], [0])[0].block_id for n in gap})
    engine.add("long", other + prompt(30 * BLOCK, 4))
    engine.add("again", tokens)
    engine.run()
    assert engine.moved["again"] == [*range(8 * BLOCK + LEAD, 16 * BLOCK)]
    assert engine.said["long"] == following(other + prompt(30 * BLOCK, 4), 4)
    assert engine.scheduler.jumps.counts["jumped_tokens"] == (20 + 7) * BLOCK


@ENGINES
def test_blocks_that_others_fill_in_front_of_moved_text(kind):
    """A request that waits to copy text does not jump past the beginning of that text, although it is cached now."""
    engine, tokens = ExactEngine(200, **kind, reuse="anywhere"), prompt(20 * BLOCK)
    request = run(engine, "first", tokens)
    run(engine, "copy", prompt(7, 1) + tokens[4 * BLOCK : 10 * BLOCK])
    pool, gap = engine.scheduler.block_pool, range(4, 10)
    pool.evict_blocks({pool.get_cached_block(request.block_hashes[n], [0])[0].block_id for n in gap})
    same = tokens[: 7 * BLOCK] + prompt(BLOCK, 2)
    engine.add("moved", tokens)
    engine.add("same", same, pc_reuse="prefix")
    engine.run()
    assert engine.said["same"] == following(same, 4)
    assert len(engine.said["moved"]) == 4
    assert engine.moved["moved"] == [*range(4 * BLOCK + LEAD, 10 * BLOCK - 7)]
    assert not pinned_by(engine.scheduler.jumps)


def test_what_workers_cannot_move_is_reported(warnings):
    engine, text = ExactEngine(200, cannot_move="a reason"), prompt(300)
    assert not any("text that moved" in line for line in warnings)
    run(engine, "first", prompt(20, 1) + text, pc_reuse="anywhere")
    run(engine, "second", prompt(25, 2) + text, pc_reuse="anywhere")
    assert engine.said["second"] == following(prompt(25, 2) + text, 4)
    assert "text that moved is not reused under a reason" in warnings
