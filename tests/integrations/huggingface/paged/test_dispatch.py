"""Dispatch of paged passes does not change the results of other calls of the model that run meanwhile.

`python tests/integrations/huggingface/paged/test_dispatch.py 2000` runs 2000 forward passes beside served calls, and a
tenth as many beam searches.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from generate_cases import NEW_TOKENS, left_padded, plain, prompt

from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.runners.dispatch import Dispatch, install


@pytest.fixture
def fast_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def beside_served_calls(model: Any, work: Callable[[], None], times: int) -> None:
    """Call `work` repeatedly while another thread generates over the cache."""
    stop = threading.Event()
    wrong: list[int] = []
    want = [plain(model, input_ids=prompt(40, seed)) for seed in range(3)]

    def serve() -> None:
        number = 0
        while not stop.is_set():
            got = model.generate(input_ids=prompt(40, number % 3), max_new_tokens=NEW_TOKENS)
            if not torch.equal(got, want[number % 3]):
                wrong.append(number)
            number += 1

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(times):
            work()
    finally:
        stop.set()
        thread.join()
    assert wrong == []


def forwards_beside_served_calls(model: Any, times: int) -> None:
    """Run padded forward passes, and compare each with its result alone."""
    batch = left_padded(prompt(30), prompt(9, 1))
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(**batch, position_ids=positions).logits[:, -1]

    want = logits()
    with enable_prefix_caching(model, num_blocks=64):
        beside_served_calls(model, lambda: torch.testing.assert_close(logits(), want), times)


def beams_beside_served_calls(model: Any, times: int) -> None:
    """Run beam searches, and compare each with its result alone."""
    batch = left_padded(prompt(30), prompt(9, 1))
    want = plain(model, **batch, num_beams=2, max_new_tokens=8)

    def beams() -> None:
        assert torch.equal(model.generate(**batch, num_beams=2, max_new_tokens=8), want)

    with enable_prefix_caching(model, num_blocks=64):
        beside_served_calls(model, beams, times)


@pytest.mark.slow
def test_padded_forwards_beside_served_calls(model: Any, fast_switches: None) -> None:
    forwards_beside_served_calls(model, 100)


def test_beams_beside_served_calls(model: Any, fast_switches: None) -> None:
    beams_beside_served_calls(model, 10)


@pytest.mark.slow
def test_training_and_a_model_of_the_same_config_beside_served_calls(model: Any, fast_switches: None) -> None:
    sibling = transformers.LlamaForCausalLM(model.config).eval()
    want = plain(sibling, input_ids=prompt(20))
    trained = copy.deepcopy(sibling)
    loss = trained(prompt(20), labels=prompt(20)).loss.item()

    def work() -> None:
        assert torch.equal(sibling.generate(input_ids=prompt(20), max_new_tokens=NEW_TOKENS), want)
        step = trained(prompt(20), labels=prompt(20)).loss
        step.backward()
        assert step.item() == loss

    with enable_prefix_caching(model, num_blocks=64):
        beside_served_calls(model, work, 10)


def test_registry_of_a_modeling_file_is_replaced_once(model: Any) -> None:
    assert install(model) == 1
    names = vars(sys.modules[type(model).__module__])
    registry = names["ALL_ATTENTION_FUNCTIONS"]
    assert isinstance(registry, Dispatch)
    assert install(model) == 1
    assert names["ALL_ATTENTION_FUNCTIONS"] is registry
    assert isinstance(pickle.loads(pickle.dumps(registry)), Dispatch)


def test_compiled_exported_and_copied_models_are_what_they_were(model: Any) -> None:
    want = model(prompt(12)).logits
    with enable_prefix_caching(model, num_blocks=64):
        model.generate(input_ids=prompt(40), max_new_tokens=2)
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(prompt(12)).logits, want)
        torch.testing.assert_close(copy.deepcopy(model)(prompt(12)).logits, want)
        assert "pc" not in str(model.config._attn_implementation)
