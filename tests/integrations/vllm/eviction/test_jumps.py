"""Prefill that skips gaps, in vLLM's scheduler with a model each of whose rows depends on all rows before it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from vllm_exact import BLOCK, ENGINES, RUNNERS, ExactEngine, following, preempt, prompt, random_traffic

from pc.integrations.vllm.eviction import jumps

MIN_BLOCKS = jumps.MIN_TOKENS // BLOCK


def with_holes(*ranges, num_blocks=64, kind=ExactEngine, **options):
    """Return an engine that has run a prompt and then lost these blocks of it, and the prompt."""
    engine, tokens = kind(num_blocks, **options), prompt(20 * BLOCK + 5)
    request = engine.add("first", tokens)
    engine.run()
    pool = engine.scheduler.block_pool
    blocks = [pool.get_cached_block(request.block_hashes[at], [0])[0].block_id for each in ranges for at in each]
    pool.evict_blocks(set(blocks))
    return engine, tokens


@ENGINES
def test_only_gaps_are_computed(kind):
    engine, tokens = with_holes(range(2, 5), range(12, 14), **kind)
    engine.add("again", tokens)
    engine.run()
    assert engine.said["again"] == following(tokens, 4)
    assert engine.computed["again"] == 5 * BLOCK + 5 + 3
    assert engine.scheduler.jumps.counts["jumped_tokens"] == (7 + 6) * BLOCK


@ENGINES
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(kind, seed):
    """Evictions, aborts, preemptions, chunks, 16 requests at once; references are recounted after every step."""
    rng = random.Random(seed)
    policy = rng.choice(["fifo", "default"])
    engine = ExactEngine(110, **kind, policy=policy)
    roots = [prompt(rng.randrange(300, 500), 100 + seed + at) for at in range(3)]

    def ask(_):
        root = rng.choice(roots)
        own = prompt(rng.randrange(1, 40), rng.randrange(1 << 30))
        return root[: rng.randrange(200, len(root))] + own, rng.randrange(1, 40), {}

    asked = random_traffic(engine, rng, ask)
    assert len(asked) > 30
    assert engine.said == {name: following(*each) for name, each in asked.items()}
    assert engine.scheduler.jumps.counts["jumped_tokens"] > 20 * BLOCK
    assert not engine.scheduler.jumps.pinned


@RUNNERS
def test_preempted_in_a_gap_and_resumed(runner_v2):
    """Pinned blocks are released, some are lost, and the rest is planned again."""
    engine, tokens = with_holes(range(2, 6), range(12, 14), runner_v2=runner_v2, budget=2 * BLOCK)
    request = engine.add("again", tokens)
    engine.step()
    assert list(engine.scheduler.jumps.pinned["again"]) == [*range(6, 12), *range(14, 20)]
    preempt(engine.scheduler, "again")
    assert not engine.scheduler.jumps.pinned
    pool = engine.scheduler.block_pool
    pool.evict_blocks({pool.get_cached_block(request.block_hashes[at], [0])[0].block_id for at in (8, 9)})
    engine.run()
    assert engine.said["again"] == following(tokens, 4)


def test_two_requests_with_one_gap_compute_it_once():
    engine, tokens = with_holes(range(2, 5))
    for name in ("one", "two"):
        engine.add(name, tokens)
    engine.run()
    assert engine.said["one"] == engine.said["two"] == following(tokens, 4)
    assert sum(engine.computed[name] for name in ("one", "two")) == 3 * BLOCK + 2 * (5 + 3)


def test_a_request_that_does_not_fit_waits_and_none_waits_for_ever():
    """A former fault: the check of a whole request counted pinned blocks twice."""
    engine, tokens = with_holes(range(2, 5), num_blocks=24)
    engine.add("other", prompt(6 * BLOCK, 1), 12)
    engine.step()
    engine.add("again", tokens)
    for _ in range(60):
        engine.step()
    assert engine.said["again"] == following(tokens, 4)
    assert engine.said["other"] == following(prompt(6 * BLOCK, 1), 12)


@pytest.mark.quick
def test_a_step_without_room_keeps_no_block_of_a_planned_jump(monkeypatch):
    engine, tokens = with_holes(range(2, 5))
    jumps, pool = engine.scheduler.jumps, engine.scheduler.block_pool
    free, allocate, refused = pool.get_num_free_blocks(), jumps._allocate_slots, []

    def allocate_later(request, *args, **given):
        if len(refused) < 2:  # with the jump and without it
            return refused.append(request.request_id)
        return allocate(request, *args, **given)

    monkeypatch.setattr(jumps, "_allocate_slots", allocate_later)
    engine.add("again", tokens)
    engine.run()
    assert refused == ["again", "again"]
    assert engine.said["again"] == following(tokens, 4)
    assert pool.get_num_free_blocks() == free


GAP = [range(2, 5)]
COMPUTED = {
    "a gap is skipped": ({}, {}, GAP, 3),
    "runs that are too short for a jump are computed": ({}, {}, [range(2, 3), range(3 + MIN_BLOCKS - 1, 20)], 18),
    "the request asks for prefixes alone": ({}, {"pc_reuse": "prefix"}, GAP, 18),
    "the engine asks for prefixes alone": ({"reuse": "prefix"}, {}, GAP, 18),
    "the request asks for gaps, the engine for prefixes": ({"reuse": "prefix"}, {"pc_reuse": "gap"}, GAP, 3),
    "the request asks for an unknown reuse": ({}, {"pc_reuse": "nonsense"}, GAP, 18),
    "the request asks with a list": ({}, {"pc_reuse": ["gap"]}, GAP, 18),
    "the request has another salt": ({}, {"salt": "other"}, GAP, 20),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", COMPUTED)
def test_computed_blocks_behind_a_gap(case, warnings):
    options, asked, lost, blocks = COMPUTED[case]
    engine, tokens = with_holes(*lost, num_blocks=90, **options)
    engine.add("again", tokens, **asked)
    engine.run()
    assert engine.said["again"] == following(tokens, 4)
    assert engine.computed["again"] == blocks * BLOCK + 5 + 3
    assert (engine.scheduler.jumps.counts["jumped_tokens"] > 0) == (blocks == 3)
    refused = asked.get("pc_reuse") not in (None, "prefix", "gap")
    assert any("pc_reuse of request again" in line for line in warnings) == refused


def test_hints_reach_blocks_that_are_jumped_over():
    from pc.integrations.vllm.eviction import retention_hints

    engine, tokens = with_holes(range(2, 5), policy="priority")
    engine.add("again", tokens, kv_hints=retention_hints(priority=7))
    told = []
    engine.scheduler.block_pool.policy_state.hinted = lambda ids, *_: told.extend(ids)
    engine.run()
    assert engine.computed["again"] == 3 * BLOCK + 5 + 3
    assert len(set(told)) == len(told) >= 20


class Keeping(ExactEngine):
    """An engine whose workers keep hidden states, which are each token and its position here."""

    def __init__(self, num_blocks, **options):
        from pc.integrations.vllm.hidden_states import PromptHiddenStates

        super().__init__(num_blocks, **options)
        batch = SimpleNamespace(req_ids=[])
        self.runner = SimpleNamespace(execute_model=self.rows, execute_model_state=None, input_batch=batch)
        self.kept = PromptHiddenStates(self.runner, self.scheduler.kv_cache_config, "asked")

    def prepare(self, output):
        self.runner.execute_model(output)

    def rows(self, output):
        names = self.runner.input_batch.req_ids = list(output.num_scheduled_tokens)
        spans = [range(self.begins[name], self.begins[name] + output.num_scheduled_tokens[name]) for name in names]
        rows = [[self.tokens[name][at], at] for name, span in zip(names, spans, strict=True) for at in span]
        hidden = torch.tensor(rows, dtype=torch.float32).reshape(-1, 2)
        self.runner.execute_model_state = SimpleNamespace(hidden_states=hidden)


@ENGINES
def test_hidden_states_of_what_is_jumped_over(kind):
    engine, tokens = with_holes(range(2, 5), range(12, 14), kind=Keeping, **kind)
    engine.add("again", tokens, asked=True)
    engine.run()
    assert engine.computed["again"] == 5 * BLOCK + 5 + 3
    rows = engine.kept.take()["again"]["hidden_states"]
    assert rows.tolist() == [[token, at] for at, token in enumerate(tokens)]


def test_statistics_count_what_is_jumped_over():
    engine, tokens = with_holes(range(2, 5))
    engine.scheduler.make_stats()
    request = engine.add("again", tokens)
    engine.run()
    assert request.prefill_stats is None or request.prefill_stats.num_computed_tokens == 3 * BLOCK + 5


REASONS = {
    "no prefix caching": lambda s: setattr(s.kv_cache_manager, "enable_caching", False),
    "speculative decoding": lambda s: setattr(s, "num_lookahead_tokens", 2),
    "a KV connector": lambda s: setattr(s, "connector", object()),
    "several groups of layers, windows or states": lambda s: setattr(
        s.kv_cache_manager.coordinator, "single_type_managers", s.kv_cache_manager.coordinator.single_type_managers * 2
    ),
    "an encoder": lambda s: setattr(s, "is_encoder_decoder", True),
    "pipeline parallelism": lambda s: setattr(s, "use_pp", True),
    "context parallelism": lambda s: setattr(s, "dcp_world_size", 2),
    "prefill in one piece": lambda s: setattr(s.scheduler_config, "enable_chunked_prefill", False),
    "blocks of another size than their hashes": lambda s: setattr(s, "hash_block_size", 8),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_jump_says_why(reason):
    scheduler = ExactEngine(24).scheduler
    assert jumps.why_no_jumps(scheduler) == ""
    REASONS[reason](scheduler)
    assert jumps.why_no_jumps(scheduler) == reason
