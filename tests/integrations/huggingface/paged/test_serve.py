"""Packed passes over blocks, run on the CPU with the operators in PyTorch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from generate_cases import BY_NAME, CACHE, assert_same, both, cache_of, prompt
from graph_double import TapeCapturer

from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.runners import graphs as graphs_module
from pc.integrations.huggingface.runners import packed as packed_module
from pc.integrations.huggingface.runners.packed import layer_windows


@pytest.fixture(autouse=True)
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs_module.CAPTURERS, "cpu", TapeCapturer)


def test_probe_notices_wrong_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pc.integrations.huggingface.runners.packed import PagedCache

    right = PagedCache.attend
    monkeypatch.setattr(PagedCache, "attend", lambda self, call: right(self, call._replace(scale=3 * call.scale)))
    handle = enable_prefix_caching(model)
    assert "differ by" in str(handle.graphs.reason)
    assert_same(model, input_ids=prompt(40))  # served over contiguous copies
    assert handle.stats().calls_served == 1


def test_window_that_the_cache_does_not_know_is_refused(model: Any) -> None:
    # A module attends over a window that its config does not mention.
    windowed = BY_NAME["mistral-window"].build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_module, "layer_windows", lambda config: {})
        assert "attends over a window of 20" in str(enable_prefix_caching(windowed).graphs.reason)
    chunked = copy.deepcopy(model.config)
    chunked.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(Exception, match="chunked_attention"):
        layer_windows(chunked)


def test_windows_over_holes_are_served_over_copies() -> None:
    model = BY_NAME["mistral-window"].build()
    mask = torch.ones(1, 60, dtype=torch.long)
    mask[0, 30:50] = 0
    with enable_prefix_caching(model, cuda_graphs=False) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(model, input_ids=prompt(60), attention_mask=mask, times=2)
        assert handle.graphs.eager_steps == 0
        assert handle.stats().calls_served == 2


def test_the_cache_of_a_result_over_holes(model: Any) -> None:
    """The model's own cache has a column for each masked token, so these calls are served over copies."""
    mask = torch.ones(1, 60, dtype=torch.long)
    mask[0, 30:50] = 0
    with enable_prefix_caching(model, cuda_graphs=False) as handle:
        for _ in range(2):
            want, got = both(model, input_ids=prompt(60), attention_mask=mask, return_dict_in_generate=True)
            assert torch.equal(got.sequences, want.sequences)
            for own, other in zip(cache_of(got).layers, cache_of(want).layers, strict=True):
                torch.testing.assert_close(own.keys[:, :, 50:], other.keys[:, :, 50:])
        assert handle.graphs.eager_steps == 0
        assert handle.stats().calls_served == 2


def test_the_cache_of_an_answer_that_outgrew_the_blocks(model: Any) -> None:
    expected = pytest.warns(UserWarning, match="generated without the cache")
    with enable_prefix_caching(model, num_blocks=5, cuda_graphs=False), expected:
        want, got = both(
            model, input_ids=prompt(30), max_new_tokens=60, eos_token_id=None, return_dict_in_generate=True
        )
    assert torch.equal(got.sequences, want.sequences)
    for own, other in zip(cache_of(got).layers, cache_of(want).layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys)


class _Rewrites(transformers.StoppingCriteria):  # type: ignore[misc]
    """Writes a token of the prompt, or the last one of the answer, after its KV was computed."""

    def __init__(self, column: int) -> None:
        self._column = column

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if input_ids.shape[1] == 43:
            input_ids[0, self._column] = 5
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(("column", "served"), [(3, False), (41, False), (42, True)])
def test_the_cache_of_rewritten_tokens_is_not_continued(model: Any, column: int, served: bool) -> None:
    with enable_prefix_caching(model, cuda_graphs=False) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        options: dict[str, Any] = {"return_dict_in_generate": True, "stopping_criteria": [_Rewrites(column)]}
        result = model.generate(prompt(40), max_new_tokens=8, eos_token_id=None, **options)
        assert result.sequences[0, column] == 5
        ids = torch.cat([result.sequences, prompt(5, 1)], 1)
        model.generate(ids, **{CACHE: cache_of(result)}, max_new_tokens=2)
        assert handle.stats().calls_handed_back == ({} if served else {f"{CACHE} of your own": 1})
