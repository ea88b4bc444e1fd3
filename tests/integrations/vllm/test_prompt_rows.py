"""Rows of whole prompts along what vLLM's scheduler says, without a model: as many as tokens, and each its token's."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

from vllm_steps import Steps, following, rows_of

from pc.integrations.vllm.hidden_states.prompts import PromptHiddenStates

ASKED, GENERATED = "rows", 14


def answered(prompt):
    """A prompt and what the model answers."""
    tokens = list(prompt)
    for _ in range(GENERATED):
        tokens.append(following(tokens[-1], len(tokens) - 1))
    return tokens


def ask(steps, seed, num_requests=40):
    """Prompts that begin as others, or as others and their answers; the tokens and the rows of those that asked."""
    kept = PromptHiddenStates(steps.runner, steps.scheduler.kv_cache_config, ASKED)
    rng = random.Random(seed)
    roots = [[rng.randrange(1000) for _ in range(60)] for _ in range(3)]
    prompts, found = [], {}
    while len(prompts) < num_requests or steps.scheduler.requests:
        while len(prompts) < num_requests and len(steps.scheduler.requests) < 5:
            root = rng.choice([*roots, *map(answered, prompts[-4:])])[:90]
            prompt = root[: rng.randrange(1, len(root) + 1)] + [rng.randrange(1000) for _ in range(rng.randrange(3))]
            steps.add(str(len(prompts)), prompt, GENERATED, {ASKED: len(prompts) % 5 != 0})
            prompts.append(prompt)
        steps.step()
        taken = kept.take()
        assert not taken.keys() & found.keys(), "the same rows twice"
        found |= taken
    return prompts, found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("windows", [0, 2])
def test_a_row_for_each_token(windows, drafts, seed):
    """Hits, misses, chunks, preemption and rejected drafts; the full group lies between those of windows."""
    steps = Steps(30 + 13 * windows, windows, drafts, seed)
    prompts, found = ask(steps, seed)
    assert sorted(map(int, found)) == [n for n in range(len(prompts)) if n % 5]
    for name, rows in found.items():
        assert torch.equal(rows["hidden_states"], rows_of(prompts[int(name)])), name
    assert steps.counts["hits"] > 100
    assert steps.counts["chunks"] > 5
    assert steps.counts["resumed"] > 0
    assert (steps.counts["rejected"] > 0) == drafts
