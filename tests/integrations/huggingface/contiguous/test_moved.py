"""reuse="anywhere" in generate: exact if all moved tokens are computed again, and reported if they are not."""

from __future__ import annotations

import pytest
import torch
from generate_cases import (
    DEEPSEEK,
    FAMILIES,
    HYBRIDS,
    Family,
    assert_nothing_held,
    cache_of,
    count_computed,
    first_quick,
    left_padded,
    plain,
    prompt,
)

from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.layers import attention_layers, new_cache
from pc.integrations.huggingface.runners import moved
from pc.integrations.huggingface.runners.batch import Batch
from pc.integrations.huggingface.runners.layout import forward

LEARNED = {"gpt2", "opt"}
ROTARY = [*(family for family in FAMILIES if family.name not in LEARNED), DEEPSEEK]
LLAMA = FAMILIES[0]
ONE, TWO, END = prompt(61, 1), prompt(83, 2), prompt(5, 3)
FIRST, THEN = torch.cat([ONE, TWO, END], 1), torch.cat([TWO[:, 2:], ONE, END], 1)


def enabled(model, recompute, **options):
    return enable_prefix_caching(model, num_blocks=200, block_size=4, reuse="anywhere", recompute=recompute, **options)


def logits(result):
    return torch.cat(list(result.logits))


@pytest.mark.parametrize("by_operator", [False, True], ids=["mask", "operator"])
@pytest.mark.parametrize("family", first_quick(ROTARY), ids=lambda family: family.name)
def test_all_computed_again_is_what_is_computed_without_it(family, by_operator, monkeypatch):
    """Force the path of repairs, which the cost estimate would not choose if all tokens are computed again."""
    monkeypatch.setattr(moved, "KERNELS_ON_CPU", by_operator)
    model, show = family.build(), {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    want = logits(plain(model, input_ids=THEN, **show))
    monkeypatch.setattr(Batch, "_rows_cost", lambda self: 0.0)
    with enabled(model, 1) as handle:
        model.generate(FIRST, max_new_tokens=2)
        calls, attend = [], moved.sparse_gap_attention
        monkeypatch.setattr(moved, "sparse_gap_attention", lambda *a, **k: calls.append(a) or attend(*a, **k))
        got = logits(model.generate(THEN, **show))
        (report,) = handle.last_requests
        assert report.moved_tokens == report.repaired_tokens > 130
        # DeepSeek expands latent rows, so attention gets other keys than the marked ones.
        serves = getattr(model, "_supports_attention_backend", False) and family is not DEEPSEEK
        assert bool(calls) == (by_operator and serves)
        assert (got - want).abs().max() <= 2e-6 * want.abs().max()
        assert_nothing_held(handle)


def test_what_moved_is_not_computed_and_told_apart():
    model = LLAMA.build()
    with enabled(model, 0.1) as handle:
        model.generate(FIRST, max_new_tokens=2)
        computed = count_computed(model, input_ids=THEN, max_new_tokens=1)
        (report,) = handle.last_requests
        assert report.cached_tokens == 0
        assert report.moved_tokens > 130
        assert report.repaired_tokens == pytest.approx(0.1 * report.moved_tokens, abs=2)
        assert computed == report.prompt_tokens - report.moved_tokens + report.repaired_tokens
        stats = handle.stats()
        assert (stats.moved_tokens, stats.repaired_tokens) == (report.moved_tokens, report.repaired_tokens)
        assert stats.hit_tokens == 0
        assert "moved_spans=((0, " in repr(report)
        assert_nothing_held(handle)


def test_what_is_approximate_is_read_by_its_like_alone():
    """An exact request over the same manager hits no approximate block, but the next call of the handle does."""
    model = LLAMA.build()
    with enabled(model, 0.1) as handle:
        model.generate(FIRST, max_new_tokens=2)
        model.generate(THEN, max_new_tokens=2)
        manager = handle.manager
        assert manager.allocate("exact", THEN[0].numpy()).num_cached_tokens == 0
        manager.free("exact")
        model.generate(THEN, max_new_tokens=2)
        assert handle.last_requests[0].cached_tokens > 140
        assert not handle.last_requests[0].moved_spans


def test_ragged_batches_samples_and_salts():
    model = LLAMA.build()
    with enabled(model, 0.2) as handle:
        model.generate(FIRST, max_new_tokens=2)
        rows = left_padded(THEN, torch.cat([prompt(3, 9), ONE, END], 1))
        torch.manual_seed(0)
        tokens = model.generate(**rows, max_new_tokens=3, do_sample=True)
        assert tokens.shape == (2, rows["input_ids"].shape[1] + 3)
        assert [report.moved_tokens > 50 for report in handle.last_requests] == [True, True]
        with handle.salt("other"):
            model.generate(THEN, max_new_tokens=2)
        assert handle.last_requests[0].moved_tokens == 0
        assert_nothing_held(handle)


def test_prompts_that_find_nothing_and_hidden_states_are_exact():
    model = LLAMA.build()
    want = plain(model, input_ids=THEN, max_new_tokens=4)
    with enabled(model, 0) as handle:
        assert torch.equal(model.generate(THEN, max_new_tokens=4), want)
        model.generate(FIRST, max_new_tokens=2)
        shown = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 4}
        again = torch.cat([ONE, THEN], 1)
        assert torch.equal(model.generate(again, **shown).sequences, plain(model, input_ids=again, max_new_tokens=4))
        assert not handle.last_requests[0].moved_spans


@pytest.mark.parametrize("family", [f for f in ROTARY if f.name in ("gemma3", "deepseek-v3")], ids=lambda f: f.name)
def test_rows_are_those_of_their_new_places(family):
    """Compare moved rows of the first layer, which depend on token and position only, with computed ones."""
    model = family.build()
    with enabled(model, 0) as handle:
        model.generate(FIRST, max_new_tokens=2)
        got = cache_of(model.generate(THEN, max_new_tokens=1, return_dict_in_generate=True))
        assert handle.last_requests[0].moved_tokens > 130
        forward(model, THEN[0].numpy(), 0, THEN.shape[1], whole := new_cache(model.config))
        own, other = (attention_layers(cache)[0] for cache in (whole, got))
        for side in ("keys", "values"):  # angles are float32
            torch.testing.assert_close(getattr(other, side), getattr(own, side), atol=2e-4, rtol=0)


BLOOM = Family("bloom", "BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4})
REFUSED = [(family, "it has learned position embeddings") for family in FAMILIES if family.name in LEARNED]
REFUSED += [(HYBRIDS[0], "states cannot be moved"), (BLOOM, "fails with a mask for each query")]


@pytest.mark.parametrize(("family", "why"), [pytest.param(*each, id=each[0].name) for each in REFUSED])
def test_models_that_cannot_be_served_so_are_named(family, why):
    model = family.build()
    with pytest.warns(UserWarning, match="falls back to the model's own generate"):
        handle = enabled(model, 0.1)
    with handle:
        assert why in handle.unsupported
        assert type(model).__name__ in handle.unsupported
        assert torch.equal(model.generate(THEN, max_new_tokens=3), plain(model, input_ids=THEN, max_new_tokens=3))
