"""Sparse attention whose indexer has its own key for each token, as in DeepSeek-V3.2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from generate_cases import (
    SPARSE,
    Family,
    assert_same,
    both,
    cache_of,
    cached,
    enabled,
    left_padded,
    plain,
    prompt,
)

from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.store.kept import PromptStore

if not hasattr(transformers, "DeepseekV32ForCausalLM"):
    pytest.skip("needs a transformers with DeepSeek-V3.2", allow_module_level=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return SPARSE.build()


def question(seed: int) -> torch.Tensor:
    return torch.cat([prompt(70), prompt(9, seed)], 1)


@pytest.mark.slow
def test_rows_go_on_behind_a_cached_prefix(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with enabled(model, num_blocks=64) as handle:
        assert_same(model, input_ids=question(1))
        assert cached(model, handle, question(2)) == 70
        monkeypatch.setattr(PromptStore, "take_cache", lambda *_: None)  # read blocks, not kept caches
        assert cached(model, handle, question(3)) == 70
        assert_same(model, **left_padded(question(4), prompt(33, 7)))
        assert_same(model, **left_padded(question(5), prompt(33, 7)), num_beams=2)
        assert_same(model, input_ids=question(6), num_return_sequences=2, do_sample=True)
        assert_same(model, input_ids=question(6), prompt_lookup_num_tokens=3)
        assert not handle.stats().calls_handed_back


def test_keys_of_the_indexer_are_kept(model: Any) -> None:
    with enable_prefix_caching(model, num_blocks=64) as handle:
        found = []
        for _ in range(2):
            want, got = both(model, input_ids=question(1), return_dict_in_generate=True)
            found.append(handle.last_requests[0].cached_tokens)
            for own, other in zip(cache_of(want).layers, cache_of(got).layers, strict=True):
                torch.testing.assert_close(own.indexer_keys, other.index.keys[:, 0], rtol=1e-4, atol=1e-5)
        assert found == [0, 78]


def test_more_than_the_indexer_takes_falls_back(model: Any) -> None:
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert_same(model, input_ids=prompt(100), max_new_tokens=28)
        assert handle.stats().calls_served == 1
        want = plain(model, input_ids=prompt(100), max_new_tokens=29)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.equal(model.generate(prompt(100), max_new_tokens=29), want)
        assert ["its indexer" in str(w.message) for w in told] == [True]
        (reason,) = handle.stats().calls_handed_back
        assert "its indexer" in reason


DOGE = Family("doge", "DogeConfig", "DogeForCausalLM", {"keep_window_size": 64})


def test_attention_that_selects_keys_without_an_indexer() -> None:
    model = DOGE.build()
    with enabled(model, num_blocks=64) as handle:
        for number, length in enumerate((40, 40, 52)):
            assert cached(model, handle, prompt(length), max_new_tokens=12) == (0, 39, 40)[number]
        with pytest.warns(UserWarning, match="its indexer or attention"):
            assert_same(model, input_ids=prompt(53), max_new_tokens=12)
        assert sum(handle.stats().calls_handed_back.values()) == 1
        with pytest.raises(ValueError, match="adds values of its own to scores"):  # kernels for documents do not
            handle.compress(prompt(40))
