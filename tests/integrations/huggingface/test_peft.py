"""PEFT around a model with caching: adapters, adapters for each row, and tunings that put tokens before the prompt."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generate_cases import LLAMA, Family, enabled, left_padded, prompt
from image_cases import CASES, text
from torch.nn.modules.module import register_module_forward_hook

from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.probe import LONG

peft = pytest.importorskip("peft")

FREE: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(peft|transformers)")
        yield


@pytest.fixture
def model() -> Any:
    return adapted(LLAMA)


def adapted(family: Family) -> Any:
    inner = family.build()
    torch.manual_seed(2)
    model = peft.get_peft_model(inner, peft.LoraConfig(r=4, **LORA), adapter_name="first").eval()
    model.add_adapter("second", peft.LoraConfig(r=2, **LORA))
    return model.eval()


def test_adapters_share_nothing(model: Any) -> None:
    def calls() -> Iterator[torch.Tensor]:
        for name in ("first", "second"):
            model.set_adapter(name)
            yield model.generate(input_ids=prompt(60), **FREE)
        with model.disable_adapter():
            yield model.generate(input_ids=prompt(60), **FREE)

    want = list(calls())
    assert not any(torch.equal(want[i], want[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    with enable_prefix_caching(model) as handle:
        for cached in (0, 59):  # the answer fills the block that the prompt ends in, so all but the last token is read
            for expected, got in zip(want, calls(), strict=True):
                assert torch.equal(expected, got)
                assert handle.last_requests[0].cached_tokens == cached
        assert handle.stats().calls_handed_back == {}


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_adapters_of_the_vision_tower(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    torch.manual_seed(2)
    model = peft.get_peft_model(case.build(), peft.LoraConfig(r=4, **LORA), adapter_name="first").eval()
    model.add_adapter("second", peft.LoraConfig(r=2, **LORA))
    model.eval()
    one, two = (case.call(*[[text(20, 0), image, text(30, 1)] for image in images]) for images in ([1], [1, 2]))
    options = {**FREE, "max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}

    def logits() -> Iterator[torch.Tensor]:
        for adapter in ("first", "second", "first"):
            model.set_adapter(adapter)
            yield torch.stack(model.generate(**one, **options).logits)
        with model.disable_adapter():
            yield torch.stack(model.generate(**one, **options).logits)
        for names in (["first", "second"], ["second", "first"]):
            yield torch.stack(model.generate(**two, **options, adapter_names=names).logits)

    want = list(logits())
    assert not torch.allclose(want[0], want[1], atol=0.1)
    with enabled(model.base_model.model, num_blocks=64) as handle:
        for _ in range(2):
            for expected, got in zip(want, logits(), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        assert handle.stats().calls_served == 8
        assert handle.stats().calls_handed_back == {"images with adapter_names": 4}
        assert handle.stats().hit_tokens > 0


def test_adapters_that_are_switched_within_a_forward_pass(model: Any) -> None:
    """Another thread may do so. The KV of such a pass belongs to neither adapter."""
    model.set_adapter("first")
    want, switches = model.generate(input_ids=prompt(60), **FREE), [True]

    def switch(module: Any, *_: Any) -> None:
        if switches and module is inner.layers[0]:
            model.set_adapter("second")
        elif switches and module is inner.norm:
            model.set_adapter("first")
            switches.clear()

    inner = model.base_model.model.model
    with enable_prefix_caching(model) as handle:
        hook = register_module_forward_hook(switch)
        try:
            model.generate(input_ids=prompt(60), **FREE)
        finally:
            hook.remove()
        assert not switches
        assert torch.equal(model.generate(input_ids=prompt(60), **FREE), want)
        assert handle.last_requests[0].cached_tokens == 0


def test_adapters_by_row(model: Any) -> None:
    batch = left_padded(prompt(60), prompt(60), prompt(40, 1))
    named = [["first", "second", "first"], ["second", "__base__", "second"], ["first", "first", "__base__"]]
    want = [model.generate(**batch, **FREE, adapter_names=names) for names in named]
    beams = model.generate(**batch, **FREE, adapter_names=named[0], num_beams=2)
    assert not torch.equal(want[0][0], want[0][1])
    with enabled(model) as handle:
        model.generate(input_ids=prompt(60), **FREE)
        for again in range(2):
            for names, expected in zip(named, want, strict=True):
                assert torch.equal(model.generate(**batch, **FREE, adapter_names=names), expected)
                assert again == 0 or min(r.cached_tokens for r in handle.last_requests) > 0
            assert torch.equal(model.generate(**batch, **FREE, adapter_names=named[0], num_beams=2), beams)
        # One adapter for all, given by name, is still computed in another way than the active one.
        assert torch.equal(model.generate(input_ids=prompt(60), **FREE), want[0][:1, -72:])
        assert handle.last_requests[0].cached_tokens == 59  # calls' hooks did not empty the cache
        assert handle.stats().calls_handed_back == {}


def test_a_long_window_is_probed_without_the_adapters_of_rows() -> None:
    model = adapted(Family("long-window", "MistralConfig", "MistralForCausalLM", {"sliding_window": LONG + 4}))
    batch = torch.cat([prompt(LONG + 44), prompt(LONG + 44, 1)])
    want = model.generate(input_ids=batch, **FREE, adapter_names=["first", "second"])
    with enabled(model) as handle:
        assert torch.equal(model.generate(input_ids=batch, **FREE, adapter_names=["first", "second"]), want)
        assert handle.stats().calls_handed_back == {}


@pytest.mark.parametrize("config", ["PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"])
def test_tokens_before_the_prompt_go_to_the_model(config: str) -> None:
    options = {"encoder_hidden_size": 32} if config == "PromptEncoderConfig" else {}
    torch.manual_seed(2)
    tuning = getattr(peft, config)(task_type="CAUSAL_LM", num_virtual_tokens=5, **options)
    model = peft.get_peft_model(LLAMA.build(), tuning).eval()
    want = model.generate(input_ids=prompt(60), **FREE)
    base = model.get_base_model()
    with enable_prefix_caching(model) as handle:
        with pytest.warns(UserWarning, match="prepare_inputs_for_generation is overridden"):
            assert torch.equal(model.generate(input_ids=prompt(60), **FREE), want)
        assert handle.stats().calls_served == 0
        for cached in (0, 59):  # the inner model, called directly, is served
            assert torch.equal(
                base.generate(input_ids=prompt(60), **FREE), type(base).generate(base, prompt(60), **FREE)
            )
            assert handle.last_requests[0].cached_tokens == cached
