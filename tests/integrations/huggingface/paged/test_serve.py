"""Packed passes over blocks, run on the CPU with the operators in PyTorch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from generate_cases import (  # noqa: E402
    BY_NAME,
    PAGED,
    Family,
    assert_nothing_held,
    assert_same,
    both,
    count_computed,
    first_quick,
    left_padded,
    plain,
    prompt,
)
from graph_double import TapeCapturer  # noqa: E402

from pc.integrations.huggingface import PrefixCaching, enable_prefix_caching  # noqa: E402
from pc.integrations.huggingface.runners import graphs as graphs_module  # noqa: E402
from pc.integrations.huggingface.runners import packed as packed_module  # noqa: E402
from pc.integrations.huggingface.runners.packed import layer_windows  # noqa: E402


@pytest.fixture(autouse=True)
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs_module.CAPTURERS, "cpu", TapeCapturer)


@pytest.fixture
def handle(model: Any) -> Any:
    with enable_prefix_caching(model, cuda_graphs=False) as handle:
        assert handle.graphs.reason == "cuda_graphs=False", "else packed passes are refused, and it says why"
        yield handle


@pytest.mark.parametrize("family", first_quick(PAGED), ids=lambda f: f.name)
def test_same_tokens_cold_warm_and_pressed(family: Family) -> None:
    model = family.build()
    shared = prompt(70)
    calls = [
        {"input_ids": shared},
        left_padded(torch.cat([shared, prompt(9, 1)], 1), prompt(33, 2), shared[:, :40], prompt(1, 3)),
    ]
    for num_blocks in (None, 24):  # 24 blocks are fewer than the calls together need
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with enable_prefix_caching(model, num_blocks=num_blocks, cuda_graphs=False) as handle:
                for _ in range(2):
                    for call in calls:
                        assert_same(model, **call)
                assert handle.graphs.eager_steps > 0
                assert handle.stats().hit_tokens > 0
                assert_nothing_held(handle)


def test_batch_computes_neither_padding_nor_cached_tokens(model: Any, handle: PrefixCaching) -> None:
    batch = left_padded(prompt(100), prompt(30, 1), prompt(5, 2))
    assert count_computed(model, **batch, max_new_tokens=1) == 135
    # Whole blocks hold 96 of 100 tokens, 16 of 30 and none of 5.
    assert count_computed(model, **batch, max_new_tokens=1) == 4 + 14 + 5


def test_finished_rows_are_left_out(model: Any, handle: PrefixCaching) -> None:
    batch = left_padded(*(prompt(n, n) for n in (40, 30, 20, 10)))
    generated = plain(model, **batch, eos_token_id=None, max_new_tokens=30)[:, 40:]
    eos = generated[1, 2].item()  # the second row's third token, which then ends each answer
    want, got = both(model, **batch, eos_token_id=eos, max_new_tokens=30)
    assert torch.equal(want, got)
    lengths = [(row == eos).nonzero()[0].item() + 1 if (row == eos).any() else 30 for row in generated]
    assert min(lengths) < 30
    handle.reset()
    computed = count_computed(model, **batch, eos_token_id=eos, max_new_tokens=30)
    assert computed == 100 + sum(n - 1 for n in lengths)
    assert_nothing_held(handle)


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
