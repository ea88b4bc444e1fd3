"""Layers with windows hold only what the window and the next step need, for prompts and answers of any length."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from generate_cases import (
    BY_NAME,
    CACHE,
    NEW_TOKENS,
    assert_nothing_held,
    assert_same,
    cache_of,
    cached,
    enabled,
    left_padded,
    plain,
    prompt,
)

from pc.cache.policies import POLICIES, hazard
from pc.demo._measure import MiddleFirst
from pc.integrations.huggingface import enable_prefix_caching, layers

WINDOWS = ["mistral-window", "gemma2", "gemma3", "gpt-oss"]
FEW = 8
"""Number of blocks of 16 tokens, which hold less than half of the longest prompts here."""
QUICK: list[Any] = [("llama", "arc"), ("mistral-window", "hazard"), ("gemma2", MiddleFirst)]
OTHERS = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(("llama", "mistral-window", "gemma2"), [*sorted(POLICIES), MiddleFirst])
    if case not in QUICK and case[1] != "default"  # which is one of the others
]


pytestmark = pytest.mark.usefixtures("short_steps")


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of the buffers of layers with windows, in tokens, for each update."""
    seen: list[int] = []
    update = layers.GrowingWindowLayer.update

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, *args, **kwargs)
        seen.append(self._keys_buffer.shape[2])
        return result

    monkeypatch.setattr(layers.GrowingWindowLayer, "update", watched)
    return seen


@pytest.mark.parametrize("name", WINDOWS)
def test_few_blocks_serve_long_prompts_and_answers(name: str, longest: list[int]) -> None:
    model = BY_NAME[name].build()
    document = prompt(260)
    with enabled(model, num_blocks=64, window_blocks=FEW) as handle:
        longest.clear()
        for seed, reused in ((1, 0), (2, 256)):
            assert cached(model, handle, torch.cat([document, prompt(20, seed)], 1), max_new_tokens=4) == reused
        first = assert_same(model, input_ids=prompt(40, 3), max_new_tokens=150, eos_token_id=None)
        assert max(longest) < 150  # of 430 tokens: only a window, a chunk and room to grow
        assert cached(model, handle, torch.cat([first, prompt(5, 1)], 1), max_new_tokens=4) == 176
        window = handle.manager.pools[0 if name == "mistral-window" else 1]
        assert window.num_blocks == FEW
        assert window.residency.totals()[0].sum() > 0
        assert handle.stats().calls_handed_back == {}


def test_rows_whose_hits_end_apart() -> None:
    model = BY_NAME["gemma2"].build()
    document = prompt(96)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert_same(model, input_ids=document, max_new_tokens=2)
        for lengths in ((96, 50), (90, 96, 17)):
            rows = [torch.cat([document[:, :length], prompt(3, length)], 1) for length in lengths]
            assert_same(model, **left_padded(*rows), max_new_tokens=8)
            assert_nothing_held(handle)


def test_prompt_that_does_not_fit_is_served_and_not_kept() -> None:
    model = BY_NAME["gemma2"].build()
    with enabled(model, num_blocks=6, window_blocks=FEW) as handle:
        with pytest.warns(UserWarning, match="give a larger num_blocks"):
            assert_same(model, input_ids=prompt(130), max_new_tokens=30)
        assert handle.stats().calls_served == 1
        assert cached(model, handle, prompt(130), max_new_tokens=30) > 0  # as many tokens as had room


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "policy"), QUICK + OTHERS)
def test_tiers_and_cached_blocks_behind_them_bring_prompts_back(
    monkeypatch: pytest.MonkeyPatch, name: str, policy: Any, every: int
) -> None:
    monkeypatch.setattr(hazard.policy, "FIRST", 1)  # let the policy use its own order from the first eviction on
    model = BY_NAME[name].build()
    prompts = [prompt(150, seed) for seed in range(3)]
    wanted = [plain(model, input_ids=ids, max_new_tokens=2) for ids in prompts]
    for blocks in range(8 if name == "mistral-window" else 10, 17, every):  # without windows a prompt needs 10
        windows = {} if name == "llama" else {"window_blocks": blocks}
        options: dict[str, Any] = {"num_blocks": blocks, "host_blocks": 64, "policy": policy, **windows}
        with enable_prefix_caching(model, **options) as handle:
            for turn in range(2):
                for ids, want in zip(prompts, wanted, strict=True):
                    assert torch.equal(model.generate(ids, max_new_tokens=2), want)
                    assert handle.last_requests[0].cached_tokens == 144 * turn, blocks
                    assert_nothing_held(handle)


def test_cache_of_a_result_that_was_cropped() -> None:
    model = BY_NAME["mistral-window"].build()
    with enabled(model, num_blocks=64, window_blocks=FEW) as handle:
        result = model.generate(prompt(150), max_new_tokens=60, return_dict_in_generate=True, eos_token_id=None)
        rest = cache_of(result)
        assert rest.get_seq_length() == 209
        with pytest.raises(RuntimeError, match="tokens_to_remove: got -190"):
            rest.crop(-190)
        assert rest.get_seq_length() == 209
        rest.crop(-2)
        ids = torch.cat([result.sequences[:, :207], prompt(5, 1)], 1)
        want = plain(model, input_ids=ids)
        assert torch.equal(model.generate(ids, **{CACHE: rest}, max_new_tokens=NEW_TOKENS), want)
        assert handle.stats().calls_handed_back == {}
        handle.reset()
        result = model.generate(prompt(150), max_new_tokens=60, return_dict_in_generate=True, eos_token_id=None)
        for seed in range(1, 4):  # evicts its blocks; the returned cache stays valid
            assert_same(model, input_ids=prompt(150, seed), max_new_tokens=4)
        ids = torch.cat([result.sequences, prompt(5, 1)], 1)
        want = plain(model, input_ids=ids, max_new_tokens=40)
        assert torch.equal(model.generate(ids, **{CACHE: cache_of(result)}, max_new_tokens=40), want)


def test_prompts_are_computed_in_the_chunks_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes, update = BY_NAME["gemma2"].build(), [], layers.GrowingWindowLayer.update

    def watched(self: Any, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        passes.append(keys.shape[2])
        return update(self, keys, *args, **kwargs)

    with enabled(model, num_blocks=64, window_blocks=FEW) as handle:
        monkeypatch.setattr(layers.GrowingWindowLayer, "update", watched)
        for chunk in (24, 7):
            passes.clear()
            assert_same(model, input_ids=prompt(260, chunk), prefill_chunk_size=chunk)
            assert max(passes) == chunk
        assert handle.stats().calls_served == 2
