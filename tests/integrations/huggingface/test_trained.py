"""A trained model gives the same answers with the cache as without: the same text, and in float32 the same tokens."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pc.demo._measure import compare_tokens
from pc.demo._models import read_document
from pc.demo._workloads import between
from pc.integrations.huggingface import enable_prefix_caching

pytestmark = pytest.mark.slow
TEXT = between(read_document(), "Article V\n", "Article VI\n")
QUESTIONS = ("Who proposes amendments?", "How many States must ratify an amendment?")
HIDDEN = {"output_hidden_states": True, "return_dict_in_generate": True}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 50},
    "beams": {"num_beams": 3},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "hidden states": HIDDEN,
}


@pytest.fixture(scope="module")
def tokenizer(trained_model: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(trained_model)


@pytest.fixture(scope="module")
def model(trained_model: Path) -> Any:
    return load(trained_model)


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[torch.Tensor]:
    return [tokenizer(f"{TEXT}\n\nQ: {question}\nA:", return_tensors="pt").input_ids for question in QUESTIONS]


def answer(model: Any, prompt: torch.Tensor, **call: Any) -> torch.Tensor:
    """Return the tokens of a call, and its hidden states if they are asked for."""
    torch.manual_seed(7)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)} | call
    return model.generate(prompt, **options)


@pytest.mark.parametrize("name", CALLS)
def test_tokens_are_those_of_plain_generate(name: str, model: Any, prompts: list[torch.Tensor]) -> None:
    call = CALLS[name]
    expected = [answer(model, prompt, **call) for prompt in prompts]
    with enable_prefix_caching(model, num_blocks=128) as handle:
        found = [answer(model, prompt, **call) for prompt in (*prompts, prompts[0])]
        assert handle.stats().calls_served == 3
        assert not handle.stats().calls_handed_back
        assert handle.last_requests[0].cached_tokens >= prompts[0].shape[1] // 16 * 16 - 16
    for got, want in zip(found, (*expected, expected[0]), strict=True):
        if call is HIDDEN:
            assert torch.equal(got.sequences, want.sequences)
            for ours, theirs in zip(got.hidden_states[0], want.hidden_states[0], strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
        else:
            assert torch.equal(got, want)


def test_bfloat16_parts_only_where_rounding_decides(trained_model: Path, prompts: list[torch.Tensor]) -> None:
    model = load(trained_model).to(torch.bfloat16)
    wanted = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 16}
    expected = [answer(model, prompt, **wanted) for prompt in prompts]
    with enable_prefix_caching(model, num_blocks=128):
        for prompt, want in [*zip(prompts, expected, strict=True)] * 2:
            length = prompt.shape[1]
            got = answer(model, prompt, max_new_tokens=16)[0, length:].tolist()
            logits = [step[0].to(torch.bfloat16) for step in want.logits]
            said, ok = compare_tokens(want.sequences[0, length:].tolist(), got, logits.__getitem__)
            assert ok, said


def test_memory_does_not_grow_with_requests(model: Any, tokenizer: Any) -> None:
    words = TEXT.split()

    def resident() -> int:
        gc.collect()
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    with enable_prefix_caching(model, num_blocks=64) as handle:
        for number in range(300):
            if number == 100:
                before = resident()
            begin = number % (len(words) - 20)
            ids = tokenizer(" ".join(words[begin : begin + 20]), return_tensors="pt").input_ids
            answer(model, ids, max_new_tokens=2)
        assert resident() - before < 32 << 20
        assert handle.stats().evictions > 0
        assert handle.stats().calls_served == 300
