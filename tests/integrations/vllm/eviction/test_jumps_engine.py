"""Skipped gaps in vLLM's engine: the tokens and log-probabilities are those of vLLM's own scheduler."""

from __future__ import annotations

import random

import pytest
import vllm_engine

OPTIONS = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 192, "num_gpu_blocks_override": 90}
GENERATED = 6


def texts(count, seed, vocabulary=500):
    """Return prompts that share beginnings of three longer ones."""
    rng = random.Random(seed)
    roots = [rng.choices(range(3, vocabulary), k=400) for _ in range(3)]
    made = []
    for _ in range(count):
        tail = rng.choices(range(3, vocabulary), k=rng.randrange(1, 50))
        made.append(rng.choice(roots)[: rng.randrange(250, 400)] + tail)
    return made


def answers(llm, prompts, rng=None):
    """Return the tokens of each prompt's answer and their log-probabilities, 16 at once, perhaps disturbed."""
    asked = vllm_engine.Requests(llm)
    for first in range(0, len(prompts), 16):
        for number in range(first, min(first + 16, len(prompts))):
            asked.add(str(number), prompts[number], max_tokens=GENERATED)
        asked.run(rng)
    return {int(name): answer for (name, _), answer in asked.answers.items()}


def compare(path, prompts, **options):
    """Compare with vLLM's own scheduler; return how many prompts were compared, and the tokens that were skipped."""
    with vllm_engine.engine(path, **OPTIONS | options | {"enable_prefix_caching": False}) as (llm, _):
        expected = answers(llm, prompts)
    options = OPTIONS | options | {"additional_config": {"pc_policy": "fifo"}}
    with vllm_engine.engine(path, ["eviction"], **options) as (llm, _):
        found = answers(llm, prompts, random.Random(0))
        jumped = llm.llm_engine.engine_core.engine_core.scheduler.jumps.counts["jumped_tokens"]
    for number, (tokens, logprobs) in found.items():
        assert tokens == expected[number][0]
        assert logprobs == pytest.approx(expected[number][1], abs=2e-4)
    return len(found), jumped


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_tokens_and_log_probabilities(model_path, name):
    """Evictions, aborts, preemptions, chunks, 16 requests at once."""
    compared, jumped = compare(model_path(name), texts(48, 1))
    assert 24 < compared < 48
    assert jumped > 300


@pytest.mark.slow
def test_a_trained_model(model_path, trained_model):
    """SmolLM2."""
    compared, jumped = compare(str(trained_model), texts(20, 2, 40_000))
    assert compared > 10
    assert jumped > 300


def test_a_jumped_block_that_is_zeroed_is_seen(model_path):
    """Otherwise the tests above could not fail."""
    (prompt,) = texts(1, 3)
    with vllm_engine.engine(model_path("llama"), ["eviction"], **OPTIONS) as (llm, _):
        core = llm.llm_engine.engine_core.engine_core
        caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
        found, pool = [answers(llm, [prompt])[0]], core.scheduler.block_pool
        for broken in (False, True):
            # The default policy must complete blocks in the order of the prompt.
            held = [block.block_id for block in pool.blocks if block.block_hash is not None]
            pool.evict_blocks(set(held[2:4]))
            for cache in caches if broken else ():
                cache[held[6]] = 0
            found.append(answers(llm, [prompt])[0])
        assert core.scheduler.jumps.counts["jumped_tokens"] > 2 * 32 * 4
    assert found[0][0] == found[1][0]
    assert found[1][1] == pytest.approx(found[0][1], abs=2e-4)
    assert found[2][1] != pytest.approx(found[0][1], abs=0.01)
