"""Requests that fail: cancelled, too long, invalid, or ended by an error in a step."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from batching_cases import GEMMA3, LLAMA, alone, assert_nothing_held, batched, config, tokens
from generate_cases import first_quick
from transformers import ContinuousBatchingConfig

from pc.integrations.huggingface import ContinuousBatching, enable_continuous_batching


@pytest.fixture(params=first_quick([GEMMA3, LLAMA]), ids=["mixed", "full"])
def model(request: Any) -> Any:
    return request.param.build()


@pytest.fixture
def batching(model: Any) -> Iterator[ContinuousBatching]:
    with enable_continuous_batching(model, num_blocks=16) as handle:
        yield handle
    assert_nothing_held(handle)


def outputs(model: Any, prompts: list[list[int]], new: int = 8) -> list[Any]:
    return list(model.generate_batch(prompts, generation_config=config(new)).values())


def collect(manager: Any, count: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    deadline = time.monotonic() + 60
    while len(results) < count and time.monotonic() < deadline:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            results[result.request_id] = result
    return results


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "got no token"),
        ([8, 9, 1 << 40], "needs integers from 0 to 502"),
        ([8, -1], "needs integers"),
        ([8, "nine"], "needs integers"),
        (tokens(300), "needs at most 256, which the blocks hold"),
    ],
    ids=["empty", "large", "negative", "text", "long"],
)
def test_one_bad_request(model: Any, batching: ContinuousBatching, bad: list[Any], message: str) -> None:
    """Only this request fails; the others get their answers."""
    good = [tokens(20, 1), tokens(30, 2)]
    with model.continuous_batching_context_manager(generation_config=config()) as manager:
        ids = [manager.add_request(prompt) for prompt in (good[0], bad, good[1])]
        results = collect(manager, 3)
    assert message in results[ids[1]].error
    assert [results[i].generated_tokens for i in (ids[0], ids[2])] == alone(model, good)


@pytest.mark.parametrize("array", [torch.tensor, np.array], ids=["tensor", "array"])
def test_a_prompt_that_is_a_tensor_or_an_array(model: Any, batching: ContinuousBatching, array: Any) -> None:
    """Transformers' own manager serves these too."""
    prompt = tokens(20, 1)
    with model.continuous_batching_context_manager(generation_config=config()) as manager:
        ids = [manager.add_request(array(given)) for given in (prompt, [1.5, 2.0])]
        results = collect(manager, 2)
    good, bad = (results[i] for i in ids)
    assert good.error is None
    assert good.prompt_ids == prompt
    assert [good.generated_tokens] == alone(model, [prompt])
    assert bad.error == "input_ids: got tokens out of range, needs integers from 0 to 502"


def test_a_request_id_in_use(model: Any, batching: ContinuousBatching) -> None:
    prompt = tokens(20, 1)
    with model.continuous_batching_context_manager(generation_config=config(12)) as manager:
        for _ in range(2):
            manager.add_request(prompt, request_id="twice")
        results = [manager.get_result(timeout=30) for _ in range(2)]
    assert sorted(result.error is None for result in results) == [False, True]
    assert "'twice', which is running" in next(r.error for r in results if r.error)
    assert [r.generated_tokens for r in results if not r.error] == alone(model, [prompt], new=12)


def test_an_answer_that_outgrows_the_blocks(model: Any) -> None:
    """In transformers' own loop, all end; here only this request ends, and the next one is served."""
    prompts = [tokens(40, 1), tokens(10, 2)]
    with enable_continuous_batching(model, num_blocks=4) as batching:
        long, short = outputs(model, prompts, new=40)
        assert "needs more blocks than the 4 there are" in long.error
        assert [short.generated_tokens] == alone(model, prompts[1:], new=40)
        assert batched(model, prompts[1:]) == alone(model, prompts[1:])
        assert_nothing_held(batching)


def test_cancelled(model: Any) -> None:
    """Other requests continue, and a waiting request gets room, even if the request that it waited for is cancelled."""
    prompts = [tokens(30, n) for n in range(4)]
    want = alone(model, prompts, new=30)
    with enable_continuous_batching(model, num_blocks=8) as batching:
        with model.continuous_batching_context_manager(generation_config=config(30)) as manager:
            ids = [manager.add_request(prompt, streaming=n == 0) for n, prompt in enumerate(prompts)]
            while not manager.get_result(timeout=30).generated_tokens:
                pass
            for request_id in (ids[0], ids[2], "unknown"):
                manager.cancel_request(request_id)
            results = collect(manager, 2)
        assert results[ids[1]].generated_tokens == want[1]
        assert results[ids[3]].generated_tokens == want[3]
        assert_nothing_held(batching)


@pytest.mark.slow
def test_the_request_that_others_wait_for_is_cancelled(model: Any) -> None:
    """Transformers admits no request until one ends normally; here waiting requests are admitted."""
    prompts = [tokens(30, 1), tokens(30, 2)]
    want = alone(model, prompts, new=30)
    model.get_decoder().layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.02))
    with enable_continuous_batching(model, num_blocks=4) as batching:
        with model.continuous_batching_context_manager(generation_config=config(30)) as manager:
            ids = [manager.add_request(prompt) for prompt in prompts]
            deadline = time.monotonic() + 20
            while not manager.batch_processor.scheduler.block_new_requests and time.monotonic() < deadline:
                time.sleep(0.005)  # beyond 32 tokens, there is room for only one request
            (running,) = list(manager.batch_processor.scheduler.active_requests)
            manager.cancel_request(running)
            result = manager.get_result(timeout=20)
            if result is None:
                manager.stop(hard_stop=True)
        assert result is not None
        assert result.request_id != running
        assert result.generated_tokens == want[ids.index(result.request_id)]
        assert_nothing_held(batching)


@pytest.mark.parametrize("failing", first_quick([2, 1, 4]))
def test_error_in_a_step(model: Any, batching: ContinuousBatching, failing: int) -> None:
    """All requests of the session fail, as in transformers; no block is held and no wrong KV is cached."""
    prompts = [tokens(40, n) for n in range(3)]
    want, steps = alone(model, prompts), iter(range(1, 100))

    def fail(*_: Any) -> None:
        probed = threading.current_thread() is threading.main_thread()  # the hook changed the model, so it is probed
        if not probed and next(steps) == failing:
            raise RuntimeError("on purpose")

    layer = model.get_decoder().layers[-1]
    hook = layer.register_forward_pre_hook(fail)
    failed = outputs(model, prompts)
    hook.remove()
    assert failed
    assert all("on purpose" in output.error for output in failed)
    assert_nothing_held(batching)
    assert batched(model, prompts) == want


def test_hard_stop(model: Any, batching: ContinuousBatching) -> None:
    with model.continuous_batching_context_manager(generation_config=config(200)) as manager:
        manager.add_request(tokens(20, 1), streaming=True)
        manager.get_result(timeout=30)
        manager.stop(hard_stop=True)
    assert_nothing_held(batching)


def test_streaming_and_log_probabilities(model: Any, batching: ContinuousBatching) -> None:
    prompt = tokens(20, 1)

    def run(**options: Any) -> tuple[list[list[int]], list[float]]:
        settings = ContinuousBatchingConfig(return_logprobs=True, max_batch_tokens=64, **options)
        with model.continuous_batching_context_manager(
            generation_config=config(), continuous_batching_config=settings
        ) as manager:
            manager.add_request(prompt, streaming=True)
            results = [manager.get_result(timeout=30) for _ in range(8)]
        return [result.generated_tokens for result in results], results[-1].logprobs

    answers, probabilities = run()
    assert answers == [answers[-1][: n + 1] for n in range(8)]
    batching.disable()
    shipped, want = run(page_size=16, num_blocks=16)
    assert answers == shipped
    assert probabilities == pytest.approx(want, rel=1e-4)


def test_kept_manager(model: Any, batching: ContinuousBatching) -> None:
    """A manager that is kept for the next call has the same blocks, and ends with the handle."""
    prompts = [tokens(40, 1)]
    settings = ContinuousBatchingConfig()
    answers = [
        [
            o.generated_tokens
            for o in model.generate_batch(
                prompts, generation_config=config(), continuous_batching_config=settings, persistent_manager=True
            ).values()
        ]
        for _ in range(2)
    ]
    assert answers == [alone(model, prompts)] * 2
    assert batching.stats().hit_tokens == 32
    batching.disable()
    assert "_cached_continuous_batching_manager" not in vars(model)


def test_options_without_meaning(model: Any, batching: ContinuousBatching) -> None:
    settings = ContinuousBatchingConfig(use_cuda_graph=True, num_blocks=3, cpu_offload_space=1.0)
    prompts = [tokens(40, 1)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model.generate_batch(prompts, generation_config=config(), continuous_batching_config=settings)
    ours = [w for w in told if "over blocks" in str(w.message)]
    assert sorted(str(w.message).split(": ")[1].split("=")[0] for w in ours) == [
        "cpu_offload_space",
        "num_blocks",
        "use_cuda_graph",
    ]
    assert {w.filename for w in ours} == {__file__}
    assert settings.num_blocks == 3
    assert torch.is_grad_enabled()
