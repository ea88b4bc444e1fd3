"""Failures of this library when continuous batching begins: transformers' own manager answers, with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batching_cases import LLAMA, alone, batched, config, tokens
from generate_cases import first_quick
from transformers import ContinuousBatchingConfig

from pc.integrations.huggingface import UnsupportedError, enable_continuous_batching
from pc.integrations.huggingface.runners.batching import enable, session

PROMPTS = [tokens(40, 1), tokens(9, 2)]
SMALL = {"page_size": 16, "num_blocks": 32, "max_batch_tokens": 64}  # of transformers' own cache
FAILED = "it failed before the first token with KeyError"
ENABLING = {
    "look": (enable, "look"),
    "check": (enable, "check_batching"),
    "probe": (enable, "probe_packed"),
    "windows": (enable, "layer_windows"),
    "blocks": (enable, "PromptStore"),
    "identity": (enable, "Identity"),
}
BEGINNING = {
    "options": (session, "_warn_of_options"),
    "queue": (session, "RequestQueue"),
    "model": (enable.ContinuousBatching, "shared"),
    "cache": (enable.ContinuousBatching, "blocks"),
    "sharing": (session, "share_prefixes"),
    "masks": (session, "without_masks"),
    "scheduler": (session, "make_scheduler"),
    "processor": (session.Processor, "__init__"),
}


def fail(*_: Any, **__: Any) -> Any:
    raise KeyError("on purpose")


def told_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = call()
    return result, [text for w in told if (text := str(w.message)).startswith("continuous batching") and FAILED in text]


@pytest.mark.quick
@pytest.mark.parametrize("where", ENABLING)
def test_what_fails_when_it_is_enabled(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    model = LLAMA.build()
    with monkeypatch.context() as patch:
        patch.setattr(*ENABLING[where], fail)
        with pytest.raises(UnsupportedError, match=FAILED):
            enable_continuous_batching(model, num_blocks=32, fallback="raise")
        assert "init_continuous_batching" not in vars(model)
        handle, told = told_of(lambda: enable_continuous_batching(model, num_blocks=32))
    assert len(told) == 1
    assert FAILED in handle.unsupported
    assert told_of(lambda: batched(model, PROMPTS, **SMALL)) == (alone(model, PROMPTS), [])
    assert sum(handle.stats().calls_handed_back.values()) == 1
    assert handle.stats().calls_served == 0
    handle.disable()
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.parametrize("warmup", first_quick([True, False]))
@pytest.mark.parametrize("where", first_quick(reversed(BEGINNING)))
def test_what_fails_when_a_manager_begins(monkeypatch: pytest.MonkeyPatch, where: str, warmup: bool) -> None:
    model, want = LLAMA.build(), alone(LLAMA.build(), PROMPTS)

    def answers() -> list[list[int]]:
        settings = ContinuousBatchingConfig(**SMALL)
        asked = {"generation_config": config(), "continuous_batching_config": settings, "warmup": warmup}
        return [output.generated_tokens for output in model.generate_batch(PROMPTS, **asked).values()]

    with enable_continuous_batching(model, num_blocks=32) as handle:
        with monkeypatch.context() as patch:
            patch.setattr(*BEGINNING[where], fail)
            assert [len(told_of(answers)[1]), told_of(answers)] == [1, (want, [])]
        assert handle.stats().calls_handed_back == {FAILED: 2}
        before = handle.stats().total_requests
        assert answers() == want
        assert (handle.stats().calls_served, handle.stats().total_requests) == (1, before + 2)
    with enable_continuous_batching(model, num_blocks=32, fallback="raise") as handle, monkeypatch.context() as patch:
        patch.setattr(*BEGINNING[where], fail)
        with pytest.raises(UnsupportedError, match=FAILED):
            answers()


def test_requests_that_came_before_the_start_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()
    with enable_continuous_batching(model, num_blocks=32) as handle:
        manager = model.init_continuous_batching(config(), ContinuousBatchingConfig(**SMALL))
        with handle.salt("tenant"):
            manager.add_request(PROMPTS[0], request_id="one")
        manager.add_request(PROMPTS[1], request_id="two")
        monkeypatch.setattr(session, "make_scheduler", fail)
        with pytest.warns(UserWarning, match=FAILED):
            manager.start()
        manager.stop(keep_for_next_session=True)
        answers = [manager.get_result(timeout=1) for _ in PROMPTS]
        found = {answer.request_id: answer.generated_tokens for answer in answers}
        assert found == dict(zip(("one", "two"), alone(model, PROMPTS), strict=True))
        assert model.init_continuous_batching(config()) is manager
        assert not manager.continuous_batching_config.allow_block_sharing  # tenants share nothing
    assert getattr(model, "_cached_continuous_batching_manager", None) is None


def test_an_error_of_transformers_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()
    wrong = config(do_sample=True, temperature=-1.0)
    with enable_continuous_batching(model, num_blocks=32) as handle:
        for generate in (model.generate_batch, type(model).generate_batch.__get__(LLAMA.build())):
            with pytest.raises(ValueError, match="temperature") as error:
                generate(PROMPTS, generation_config=wrong, continuous_batching_config=ContinuousBatchingConfig(**SMALL))
            assert not isinstance(error.value, UnsupportedError)
        assert handle.stats().calls_handed_back == {}


def test_a_changed_model_that_is_not_served_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError("its layers are of a new kind")

    model = LLAMA.build()
    with enable_continuous_batching(model, num_blocks=32) as handle:
        batched(model, PROMPTS)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        monkeypatch.setattr(enable, "probe_packed", refuse)
        with pytest.warns(UserWarning, match="its layers are of a new kind"):
            assert batched(model, PROMPTS, **SMALL) == alone(model, PROMPTS)
        assert handle.stats().calls_handed_back == {"LlamaForCausalLM: its layers are of a new kind": 1}


@pytest.mark.parametrize("wrong", ["ignore", None, True])
def test_a_wrong_fallback_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="fallback: got"):
        enable_continuous_batching(LLAMA.build(), fallback=wrong)
