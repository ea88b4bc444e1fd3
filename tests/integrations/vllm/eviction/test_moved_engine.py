"""Moved text in vLLM's engine with our attention: its time, its error, and that other requests never read it."""

from __future__ import annotations

import random

import pytest
import torch
import vllm_engine
from vllm_exact import check_references

from pc.integrations.vllm.eviction.moved import LEAD

OPTIONS = {
    "max_model_len": 512, "max_num_batched_tokens": 192, "num_gpu_blocks_override": 90, "max_logprobs": -1,
    "additional_config": {"pc_reuse": "anywhere"}, "features": ["attention", "eviction"],
}  # fmt: skip
BLOCK = 32


def ask(llm, prompt, reuse=None, salt=None):
    """Return log-probabilities of all tokens after a prompt."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=-1)
    params.extra_args = {"pc_reuse": reuse} if reuse else None
    given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
    (output,) = llm.generate([given], params, use_tqdm=False)
    (row,) = output.outputs[0].logprobs
    return torch.tensor([row[token].logprob for token in sorted(row)])


def divergence(exact, found):
    """Return the KL divergence in nats."""
    return float((exact.exp() * (exact - found)).sum())


def core_of(llm):
    return llm.llm_engine.engine_core.engine_core


def words(count, seed, vocabulary=500):
    return random.Random(seed).choices(range(3, vocabulary), k=count)


@pytest.mark.parametrize("name", ["llama_flat", "gptj_flat"])
def test_one_layer_is_exact(model_path, name):
    """With one layer, KV depends only on token and position, so copied and rotated KV equals computed KV."""
    text, moved = words(300, 1), words(30, 3)
    with vllm_engine.engine(model_path(name), **OPTIONS) as (llm, seen):
        exact = ask(llm, moved + text, "prefix", salt="apart")
        ask(llm, words(41, 2) + text)
        before = seen["tokens"]
        found = ask(llm, moved + text)
        assert seen["tokens"] - before <= 30 + LEAD + BLOCK
        torch.testing.assert_close(found, exact, atol=2e-4, rtol=0)
        core = core_of(llm)
        held = [block.block_id for block in core.scheduler.block_pool.blocks if block.block_hash is not None]
        for cache in core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache[held] = 0  # otherwise the check above could not fail
        assert (ask(llm, words(25, 4) + text) - exact).abs().max() > 0.01


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_prefixes_afterwards_are_exact(model_path, name):
    text = words(300, 1)
    with vllm_engine.engine(model_path(name), **OPTIONS) as (llm, _):
        scheduler = core_of(llm).scheduler
        ask(llm, words(40, 2) + text)
        for head in (words(30, 3), words(35, 4), words(33, 5)):
            exact = ask(llm, head + text, "prefix", salt="apart")
            moved = scheduler.jumps.counts["moved_tokens"]
            found = ask(llm, head + text)
            assert scheduler.jumps.counts["moved_tokens"] > moved + 150
            assert 1e-4 < divergence(exact, found) < 0.1
            for reuse in ("prefix", "gap"):
                torch.testing.assert_close(ask(llm, head + text, reuse), exact, atol=2e-4, rtol=0)
            check_references(scheduler)


@pytest.mark.slow
def test_a_conversation_whose_head_changes_each_turn(model_path, trained_model):
    """SmolLM2: the computed tokens and the error, compared with an untouched conversation."""
    transformers, options = pytest.importorskip("transformers"), OPTIONS | {"num_gpu_blocks_override": 300}
    from pc.demo import _models

    tokenizer = transformers.AutoTokenizer.from_pretrained(trained_model)
    document, computed, equal = tokenizer.encode(_models.read_document()), {"untouched": 0, "marker": 0}, 0
    options |= {"max_model_len": 2048, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 500 << 20}
    with vllm_engine.engine(str(trained_model), **options) as (llm, seen):
        for turn in range(4):
            told = document[: 700 + 260 * turn]
            heads = (tokenizer.encode(f"You are a helpful assistant. It is 12:{at:02d}.\n") for at in (0, turn))
            prompts = dict(zip(computed, (head + told for head in heads), strict=True))
            exact = ask(llm, prompts["marker"], "prefix", salt="apart")
            for name, prompt in prompts.items():
                before = seen["tokens"]
                found = ask(llm, prompt, "prefix" if name == "untouched" else None, salt=name)
                computed[name] += seen["tokens"] - before
            assert divergence(exact, found) < 0.003
            equal += int(exact.argmax() == found.argmax())
    assert computed["marker"] <= 1.15 * computed["untouched"]
    assert equal == 4


def test_what_cannot_turn_is_refused_by_name(model_path):
    """GPT-2 has positions in its KV, so only gaps are served."""
    text = words(300, 1)
    with vllm_engine.engine(model_path("gpt2"), **OPTIONS) as (llm, _):
        scheduler = core_of(llm).scheduler
        assert scheduler.jumps.cannot_move == "layer transformer.h.0.attn.attn, beside which is no rotary embedding"
        exact = ask(llm, words(30, 3) + text, "prefix", salt="apart")
        ask(llm, words(40, 2) + text)
        torch.testing.assert_close(ask(llm, words(30, 3) + text), exact, atol=2e-4, rtol=0)
