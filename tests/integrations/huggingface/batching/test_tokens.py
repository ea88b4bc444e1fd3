"""The tokens of generate_batch with blocks equal those of the model's generate and of transformers' generate_batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batching_cases import GEMMA3, SHARP, Sharp, alone, assert_nothing_held, batched, config, tokens
from generate_cases import VOCAB, first_quick

from pc.integrations.huggingface import enable_continuous_batching

DOCUMENT = tokens(70, 1)
PROMPTS = [DOCUMENT + tokens(n, n) for n in (5, 1, 26)] + [tokens(9, 2)]
SHIPPED = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
"""Options of transformers' own batching, which otherwise takes most of a machine's memory."""
MIXED_FIRST = [GEMMA3, *(sharp for sharp in SHARP if sharp is not GEMMA3)]
families = pytest.mark.parametrize("sharp", first_quick(MIXED_FIRST), ids=lambda sharp: sharp.family.name)


@families
def test_every_token_of_a_prompt_matters(sharp: Sharp) -> None:
    model, ids = sharp.build(), torch.tensor(tokens(56, 1))
    rows = ids.repeat(57, 1)
    changed = torch.arange(56)
    rows[changed, changed] = (ids + 3) % (VOCAB - 8) + 8
    answers = model.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=16, eos_token_id=None, do_sample=False
    )[:, 56:]
    assert [i for i in range(56) if torch.equal(answers[i], answers[56])] == []


@families
def test_tokens(sharp: Sharp) -> None:
    model = sharp.build()
    want = alone(model, PROMPTS)
    assert batched(model, PROMPTS, **SHIPPED) == want  # with transformers' defaults
    with enable_continuous_batching(model, num_blocks=64) as batching:
        assert batched(model, PROMPTS) == want
        stats = batching.stats()
        assert stats.hit_tokens == 2 * 64  # two requests with the first one's document waited for it
        assert stats.queried_tokens == sum(map(len, PROMPTS))
        assert batched(model, PROMPTS, max_batch_tokens=40) == want
        again = batching.stats()
        assert again.hit_tokens - stats.hit_tokens == sum(min(len(p) // 16 * 16, len(p) - 1) for p in PROMPTS)
        assert again.total_requests == 2 * len(PROMPTS)
        assert_nothing_held(batching)
    assert batched(model, PROMPTS[:2], **SHIPPED) == want[:2]
    assert alone(model, PROMPTS[:2]) == want[:2]


@families
@pytest.mark.slow
def test_few_blocks(sharp: Sharp) -> None:
    """Evictions and preemptions happen, since there is room for a third of the requests."""
    model = sharp.build()
    prompts = [tokens(20 + 7 * n, n) for n in range(4)]
    want = alone(model, prompts)
    with enable_continuous_batching(model, num_blocks=5) as batching:
        for scheduler in ("fifo", "prefill_first"):
            assert batched(model, prompts, scheduler_type=scheduler) == want
        assert batching.stats().evictions > 0
        assert_nothing_held(batching)


@pytest.mark.parametrize("sharp", first_quick(SHARP[::3]), ids=lambda sharp: sharp.family.name)
def test_sampled(sharp: Sharp) -> None:
    """A seed gives the same tokens as in transformers' own batching."""
    model = sharp.build()
    sampling = config(do_sample=True, temperature=1.3, top_k=40)
    options: dict[str, Any] = {"generation_config": sampling, "seed": 5, "max_batch_tokens": 512}
    prompts = sorted((tokens(n, n) for n in (40, 9, 27)), reverse=True)  # the order of requests that share blocks
    want = batched(model, prompts, **SHIPPED | options)
    with enable_continuous_batching(model, num_blocks=64):
        assert batched(model, prompts, **options) == want
        assert batched(model, prompts, **options) == want  # from cached blocks
    assert batched(model, prompts, **SHIPPED | options | {"seed": 6}) != want


def test_sampled_alone() -> None:
    """A single request's sampled tokens are those of generate with the same seed."""
    model = SHARP[0].build()
    prompt = tokens(40, 3)
    torch.manual_seed(11)
    want = alone(model, [prompt], do_sample=True, top_k=20)
    with enable_continuous_batching(model, num_blocks=64):
        sampling = config(do_sample=True, top_k=20)
        assert batched(model, [prompt], generation_config=sampling, seed=11) == want
