"""Sharing of blocks between tenants, forks, sessions, changed weights, and generate beside generate_batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from batching_cases import (
    GEMMA3,
    LLAMA,
    alone,
    assert_nothing_held,
    batched,
    config,
    tokens,
)
from generate_cases import first_quick

from pc.integrations.huggingface import (
    ContinuousBatching,
    enable_continuous_batching,
    enable_prefix_caching,
)

SHIPPED = {"page_size": 16, "num_blocks": 128, "max_batch_tokens": 256}


@pytest.fixture(params=first_quick([GEMMA3, LLAMA]), ids=["mixed", "full"])
def model(request: Any) -> Any:
    return request.param.build()


@pytest.fixture
def batching(model: Any) -> Iterator[ContinuousBatching]:
    with enable_continuous_batching(model, num_blocks=64) as handle:
        yield handle
    assert_nothing_held(handle)


def hits(batching: ContinuousBatching, run: Callable[[], Any]) -> int:
    before = batching.stats().hit_tokens
    run()
    return batching.stats().hit_tokens - before


def test_tenants_share_nothing(model: Any, batching: ContinuousBatching) -> None:
    prompts = [tokens(40, 1)]
    want = alone(model, prompts)

    def run() -> None:
        assert batched(model, prompts) == want

    assert (hits(batching, run), hits(batching, run)) == (0, 32)
    with batching.salt("tenant"):
        assert (hits(batching, run), hits(batching, run)) == (0, 32)
        with batching.salt("other"):
            assert hits(batching, run) == 0
        thread = threading.Thread(target=run)
        assert hits(batching, lambda: (thread.start(), thread.join())) == 32  # a salt applies to one thread
    assert hits(batching, run) == 32
    with pytest.raises(TypeError, match="salt: got NoneType"), batching.salt(None):
        pass


@pytest.mark.slow
def test_salt_of_requests_that_are_queued_again_and_forked(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tokens(20 + 7 * n, n) for n in range(4)]
    peaked = config(new=24, num_return_sequences=2, do_sample=True, temperature=1e-4)  # draws the likeliest token
    with enable_continuous_batching(model, num_blocks=6) as batching:
        salts: dict[str, list[Any]] = {}
        allocate = batching.manager.allocate

        def spy(key: Any, prompt: Any, salt: Any, **options: Any) -> Any:
            salts.setdefault(key.partition(" ")[2], []).append((len(prompt), salt))
            return allocate(key, prompt, salt=salt, **options)

        monkeypatch.setattr(batching.manager, "allocate", spy)
        with batching.salt("tenant"):
            answers = batched(model, prompts, generation_config=peaked)
        assert answers == [answer for answer in alone(model, prompts, new=24) for _ in range(2)]
        assert {salt for found in salts.values() for _, salt in found} == {"tenant"}
        lengths = {len(prompt) for prompt in prompts}
        again = {key for key, found in salts.items() for length, _ in found if length not in lengths}
        assert any("child" in key for key in again)  # preempted with a part of its answer
        assert batching.stats().evictions > 0
        assert_nothing_held(batching)


@pytest.mark.parametrize("length", first_quick([17, 1, 15, 16, 33]))
def test_forks(model: Any, batching: ContinuousBatching, length: int) -> None:
    """Answers of num_return_sequences are those of transformers, with computed and with cached blocks."""
    sampling = config(num_return_sequences=3, do_sample=True, temperature=1.5)
    options: dict[str, Any] = {"generation_config": sampling, "seed": 3, "max_batch_tokens": 256}
    prompt = [tokens(length, length)]
    first = batched(model, prompt, **options)
    assert len(set(map(tuple, first))) == 3
    assert batched(model, prompt, **options) == first
    batching.disable()
    if length > 1:  # transformers' own cannot run a step without tokens
        assert batched(model, prompt, **SHIPPED | options) == first


@pytest.mark.slow
def test_changed_weights(model: Any, batching: ContinuousBatching) -> None:
    prompts = [tokens(40, 1)]
    batched(model, prompts)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1)
    want = alone(model, prompts)
    assert hits(batching, lambda: batched(model, prompts)) == 0
    assert batched(model, prompts) == want
    assert hits(batching, lambda: batched(model, prompts)) == 32
    model.bfloat16()
    assert batched(model, prompts) == alone(model, prompts)
    model.float()
    batching.reset()
    assert hits(batching, lambda: batched(model, prompts)) == 0


@pytest.mark.slow
def test_generate_beside_generate_batch(model: Any, batching: ContinuousBatching) -> None:
    """Neither changes what the other, or a plain forward pass, computes, and no config changes."""
    prompts = [tokens(40, n) for n in range(3)]
    want, ids = alone(model, prompts, new=30), torch.tensor(prompts)
    logits, implementation = model(ids).logits, model.config._attn_implementation
    answers: list[list[list[int]]] = []
    with enable_prefix_caching(model, num_blocks=64) as caching:
        thread = threading.Thread(target=lambda: answers.append(batched(model, prompts, new=30)))
        thread.start()
        rounds = 0
        while thread.is_alive() or rounds < 2:
            rounds += 1
            assert torch.equal(model(ids).logits, logits)
            assert model.config._attn_implementation == implementation
            got = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None)
            assert got[:, 40:].tolist() == want
        thread.join()
        assert answers == [want]
        assert caching.stats().hit_tokens > 0  # a handle on the same model is no change of the model
        held = caching.stats().total_requests
        assert hits(batching, lambda: batched(model, prompts, new=30)) == 3 * 32
        assert caching.stats().total_requests == held


@pytest.mark.slow
def test_sessions_of_several_threads(model: Any) -> None:
    """Two sessions run at once with too few blocks for both. They take turns and share cached blocks."""
    document = tokens(33, 1)
    prompts = [[document + tokens(5 + n + 3 * t, 10 * t + n) for n in range(3)] for t in range(2)]
    want = [alone(model, mine, new=20) for mine in prompts]
    got: dict[int, list[list[int]]] = {}
    with enable_continuous_batching(model, num_blocks=5) as batching:
        threads = [
            threading.Thread(target=lambda t=t: got.update({t: batched(model, prompts[t], new=20)})) for t in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert [got.get(t) for t in range(2)] == want
        assert_nothing_held(batching)


class Computed:
    """A double of transformers' state of a request, with the attributes that blocks read."""

    generated_tokens: list[int] = []  # noqa: RUF012

    def __init__(self, request_id: str, prompt: list[int]) -> None:
        self.request_id, self.initial_tokens, self.length = request_id, prompt, 0

    def current_len(self) -> int:
        return self.length


def test_blocks_that_two_sessions_computed_go_back_with_the_step(model: Any) -> None:
    """Blocks that a merge replaced are free after the step, although their request has no room for the next one."""
    with enable_continuous_batching(model, num_blocks=8) as batching:
        first, second = (batching.blocks(model, True, 64) for _ in range(2))
        states = [Computed("a", tokens(40)), Computed("b", tokens(40))]
        for session, state in zip((first, second), states, strict=True):
            session.begin()
            assert session.can_store_request_tokens(state, 40)
        for session, state in zip((first, second), states, strict=True):
            state.length = 40
            session.mark_complete_blocks(state, {})
        first.free_blocks("a")
        assert not second.others_hold()
        second.free_blocks("b")
        assert_nothing_held(batching)


def test_a_session_that_waits_holds_nothing_for_requests_without_room(model: Any) -> None:
    with enable_continuous_batching(model, num_blocks=8) as batching:
        session = batching.blocks(model, True, 64)
        waiting, active = Computed("waits", tokens(40)), Computed("runs", tokens(40, 1))
        session.begin()
        for state in (active, waiting):
            assert session.can_store_request_tokens(state, 33)
        session.waiting = {"waits": waiting}
        session.let_go()
        assert session._held
        assert session.can_store_request_tokens(active, 40)
        session.free_blocks("runs")
        assert_nothing_held(batching)
