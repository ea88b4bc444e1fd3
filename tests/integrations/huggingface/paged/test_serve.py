"""Packed passes over blocks, run on the CPU with the operators in PyTorch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from generate_cases import BY_NAME, assert_same, prompt
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
        for _ in range(2):
            assert_same(model, input_ids=prompt(60), attention_mask=mask)
        assert handle.graphs.eager_steps == 0
        assert handle.stats().calls_served == 2
