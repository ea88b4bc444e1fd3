"""A result has the hidden states of every token, although only uncached tokens are computed."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from generate_cases import (
    BY_NAME,
    CACHE,
    HYBRIDS,
    LLAMA,
    assert_nothing_held,
    assert_same,
    both,
    cache_of,
    cached,
    count_computed,
    first_quick,
    left_padded,
    plain,
    prompt,
    remembering,
)

from pc.integrations.huggingface import enable_prefix_caching, settings
from pc.integrations.huggingface.store import kept as store

SHOWN = {"output_hidden_states": True, "return_dict_in_generate": True}


def shown(model: Any, handle: Any, **inputs: Any) -> int:
    """Check a call's hidden states against the model's own, and return how many tokens it read from the cache."""
    want, got = both(model, **SHOWN, **inputs)
    assert torch.equal(want.sequences, got.sequences)
    assert len(want.hidden_states) == len(got.hidden_states)
    for ours, own in zip(got.hidden_states, want.hidden_states, strict=True):
        assert len(ours) == len(own)
        for a, b in zip(ours, own, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert_nothing_held(handle)
    return int(handle.last_requests[0].cached_tokens)


@pytest.mark.parametrize("name", first_quick(["llama", "gpt2", "gemma2"]))
def test_cached_tokens_have_theirs(name: str) -> None:
    model = BY_NAME[name].build()
    document = prompt(70)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        first = torch.cat([document, prompt(20, 1)], 1)
        assert_same(model, input_ids=first)  # caches KV without hidden states
        manager = handle.manager
        for reused in (0, 80):
            model.generate(first, max_new_tokens=20, **SHOWN)  # transformers adds hooks, which do not count as a change
            assert handle.manager is manager
            assert handle.last_requests[0].cached_tokens == reused
        assert shown(model, handle, input_ids=first) == 80
        other = torch.cat([document, prompt(20, 2)], 1)
        assert shown(model, handle, input_ids=other) == 64
        rows = {"input_ids": torch.cat([first, other]), "attention_mask": torch.ones(2, 90, dtype=torch.long)}
        assert shown(model, handle, **rows) == 80
        assert shown(model, handle, **rows, num_beams=2) == 80
        assert shown(model, handle, input_ids=other, num_return_sequences=2, do_sample=True) == 80
        assert count_computed(model, input_ids=other, max_new_tokens=1, **SHOWN) == 10


def test_next_round_has_those_of_the_answer() -> None:
    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        result = model.generate(prompt(40), max_new_tokens=40, eos_token_id=None, **SHOWN)
        assert shown(model, handle, input_ids=torch.cat([result.sequences, prompt(9, 1)], 1)) == 64
        handle.reset()
        assert shown(model, handle, input_ids=prompt(40)) == 0


def test_a_continued_cache_gives_those_of_the_new_tokens() -> None:
    model, shares = LLAMA.build(), {}
    with enable_prefix_caching(model, num_blocks=64, fallback="raise") as handle:
        for name, generate in (("own", partial(plain, model)), ("ours", model.generate)):
            first = generate(input_ids=prompt(40), max_new_tokens=4, **SHOWN)
            ids = torch.cat([first.sequences, prompt(9, 1)], 1)
            shares[name] = generate(input_ids=ids, max_new_tokens=4, **SHOWN, **{CACHE: cache_of(first)})
        assert torch.equal(shares["ours"].sequences, shares["own"].sequences)
        assert shares["own"].hidden_states[0][0].shape[1] == 10  # the last token of the answer, and the question
        for ours, own in zip(shares["ours"].hidden_states, shares["own"].hidden_states, strict=True):
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
        assert shown(model, handle, input_ids=ids) == 32


def test_they_go_with_their_blocks() -> None:
    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=8, host_blocks=32) as handle:
        assert shown(model, handle, input_ids=prompt(60), max_new_tokens=2) == 0
        for seed in (1, 2):
            assert_same(model, input_ids=prompt(100, seed), max_new_tokens=2)
        assert shown(model, handle, input_ids=prompt(60), max_new_tokens=2) == 0  # from the host, without hidden states
        assert shown(model, handle, input_ids=prompt(60), max_new_tokens=2) == 48
        with torch.inference_mode():
            assert shown(model, handle, input_ids=prompt(60, 3), max_new_tokens=2) == 0
        assert shown(model, handle, input_ids=prompt(60, 3), max_new_tokens=2) == 48


@pytest.mark.slow
def test_what_has_none_computes_all_tokens() -> None:
    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for _ in range(2):
            assert shown(model, handle, input_ids=prompt(40), output_attentions=True) == 0
            assert shown(model, handle, input_ids=prompt(40), prompt_lookup_num_tokens=3) == 0
            some = {**SHOWN, "output_hidden_states": [0, -1]}
            want, got = both(model, input_ids=prompt(40), **some)
            torch.testing.assert_close(want.hidden_states[0][-1], got.hidden_states[0][-1])
        padded = left_padded(prompt(40), prompt(20, 1))
        want, got = both(model, **padded, **SHOWN)
        assert torch.equal(want.sequences, got.sequences)
        assert got.hidden_states[0][0].shape == want.hidden_states[0][0].shape
        assert_same(model, input_ids=prompt(40), output_hidden_states=True)  # the result does not return them
        assert handle.last_requests[0].cached_tokens == 39
    for family in (BY_NAME["mistral-window"], HYBRIDS[1]):
        model = remembering(family)
        with enable_prefix_caching(model, num_blocks=64) as handle:
            for _ in range(2):
                assert shown(model, handle, input_ids=prompt(70)) == 0
            assert_same(model, input_ids=prompt(70))


def test_too_little_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()
    monkeypatch.setattr(store, "memory_budget", lambda model: 2000)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        model.generate(prompt(40), max_new_tokens=2, **SHOWN)
        handle.reset()
        for _ in range(2):
            assert shown(model, handle, input_ids=prompt(70)) == 0


@pytest.fixture
def half_a_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit hidden states to half a megabyte; those of the default 128 blocks would need three times as much."""
    for module in (settings, store):
        monkeypatch.setattr(module, "memory_budget", lambda model: 1 << 20)


@pytest.mark.usefixtures("half_a_megabyte")
@pytest.mark.slow
def test_as_many_blocks_have_theirs_as_fit() -> None:
    model = LLAMA.build()
    with enable_prefix_caching(model) as handle:
        assert handle.stats().num_blocks == 128
        assert shown(model, handle, input_ids=prompt(90)) == 0
        assert shown(model, handle, input_ids=prompt(90)) == 80
        for seed in range(1, 11):  # five or six blocks each; there is room for 42
            assert shown(model, handle, input_ids=prompt(90, seed)) == 0
        assert shown(model, handle, input_ids=prompt(90, 10)) == 80
        assert shown(model, handle, input_ids=prompt(90)) < 80  # some were dropped
        assert shown(model, handle, input_ids=prompt(90)) == 80


@pytest.mark.usefixtures("half_a_megabyte")
def test_longer_than_what_fits_is_read_up_to_there_and_that_is_said_once() -> None:
    model = LLAMA.build()
    model.config.max_position_embeddings = 2048
    with enable_prefix_caching(model) as handle:
        ids = prompt(800)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert shown(model, handle, input_ids=ids, max_new_tokens=2) == 0
            for _ in range(2):
                assert shown(model, handle, input_ids=ids, max_new_tokens=2) == 42 * 16
        assert cached(model, handle, ids, max_new_tokens=2) == 799  # KV stayed cached
    texts = [str(w.message) for w in told if "prefix caching" in str(w.message)]
    assert len(texts) == 1
    assert "127 cached tokens are computed again" in texts[0]
    assert "in at most 42 blocks of 16 tokens" in texts[0]


def test_rows_of_a_prompt_give_way_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()
    for module in (settings, store):
        monkeypatch.setattr(module, "memory_budget", lambda model: 2 * 6 * 16 * 3 * 64 * 4)  # six blocks
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert shown(model, handle, input_ids=prompt(64), max_new_tokens=1) == 0
        assert shown(model, handle, input_ids=prompt(64, 1), max_new_tokens=1) == 0
        assert shown(model, handle, input_ids=prompt(64), max_new_tokens=1) == 32
