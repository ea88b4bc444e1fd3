"""In bfloat16 and float16, logits after a cached prefix have no larger error than the model's own, against float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from generate_cases import BY_NAME, enabled, left_padded, plain, prompt

from pc.integrations.huggingface import enable_continuous_batching, enable_prefix_caching


def _logits(result: Any) -> torch.Tensor:
    return torch.stack(result.logits).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral-window"])
def test_logits_stay_within_the_budget(name: str, dtype: torch.dtype) -> None:
    model, exact = BY_NAME[name].build().to(dtype), BY_NAME[name].build().double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 1}
    shared = prompt(64)
    calls = [
        {"input_ids": torch.cat([shared, prompt(9, 1)], 1)},
        left_padded(torch.cat([shared, prompt(21, 2)], 1), shared[:, :40], prompt(30, 3)),
    ]
    with enable_prefix_caching(model) as handle:
        for _ in range(2):
            for call in calls:
                want = _logits(plain(exact, **call, **options))
                own = (_logits(plain(model, **call, **options)) - want).abs().max()
                ours = (_logits(model.generate(**call, **options)) - want).abs().max()
                rounding = torch.finfo(dtype).eps * want.abs().max()
                assert ours <= 2 * own + rounding, (ours, own, rounding)
        assert handle.last_requests[0].cached_tokens >= 64
        assert handle.stats().calls_handed_back == {}


@pytest.fixture
def set_precision() -> Iterator[Callable[[str], None]]:
    places: list[Any] = [torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]
    if not all(hasattr(place, "fp32_precision") for place in places):
        pytest.skip("this torch names no precision for single backends")
    before = [place.fp32_precision for place in places]
    yield torch.set_float32_matmul_precision
    for place, precision in zip(places, before, strict=True):
        place.fp32_precision = precision


def test_keys_and_values_of_another_precision_are_not_read(set_precision: Callable[[str], None]) -> None:
    """With "medium", some CPUs round the inputs of products to bfloat16."""
    model, found = BY_NAME["llama"].build(), list[int]()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for precision in ("highest", "medium", "medium", "highest"):
            set_precision(precision)
            model.generate(prompt(40), max_new_tokens=2)
            found.append(handle.last_requests[0].cached_tokens)
    assert found == [0, 0, 32, 32]


def test_batching_reads_no_keys_and_values_of_another_precision(set_precision: Callable[[str], None]) -> None:
    model, found = BY_NAME["llama"].build(), list[int]()
    with enable_continuous_batching(model, num_blocks=64) as handle:
        for precision in ("highest", "medium", "medium"):
            set_precision(precision)
            model.generate_batch([prompt(40)[0].tolist()], max_new_tokens=2, progress_bar=False)
            found.append(handle.stats().hit_tokens)
    assert found == [0, 0, 32]


def test_batching_caches_nothing_after_another_precision_begins(set_precision: Callable[[str], None]) -> None:
    model, thread, passes = BY_NAME["llama"].build(), threading.get_ident(), list[int]()

    def begin(*_: Any) -> None:
        passes.append(0)
        if len(passes) == 8 and threading.get_ident() != thread:
            set_precision("medium")

    model.lm_head.register_forward_hook(begin)
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "progress_bar": False}
    with enable_continuous_batching(model, num_blocks=64) as handle:
        passes.clear()
        ids = prompt(40)[0].tolist()
        (first,) = model.generate_batch([ids], **options).values()
        set_precision("highest")
        model.generate_batch([[*ids, *first.generated_tokens]], **options)
        assert handle.stats().hit_tokens == 32  # without a block of tokens after the eighth pass


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
def test_a_model_whose_dtype_changes_within_a_call(name: str, options: dict[str, Any]) -> None:
    """transformers' layers concatenate, which promotes the keys and values from before the change."""
    model = BY_NAME[name].build()

    def generate(function: Callable[..., Any], dtype: torch.dtype, **call: Any) -> Any:
        model.float()

        def convert(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            model.to(dtype if ids.shape[1] > 42 else torch.float32)
            return scores

        return function(input_ids=prompt(40), max_new_tokens=8, logits_processor=[convert], **call)

    asked: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    with enabled(model, **options):
        for _ in range(2):
            want = _logits(generate(lambda **call: plain(model, **call), torch.float64, **asked))
            torch.testing.assert_close(_logits(generate(model.generate, torch.float64, **asked)), want)
            with pytest.raises(RuntimeError, match="to have the same dtype"):  # as plain generate raises
                generate(model.generate, torch.bfloat16, num_beams=2)
