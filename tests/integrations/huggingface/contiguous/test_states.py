"""Hybrid models: the manager's blocks hold states of recurrent and convolution layers, and are evicted like others."""

from __future__ import annotations

import functools
from typing import Any

import generate_cases
import pytest
import torch
from generate_cases import (
    HYBRIDS,
    Family,
    assert_nothing_held,
    assert_same,
    both,
    count_computed,
    enabled,
    first_quick,
    left_padded,
    prompt,
    remembering,
)

from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.probe import probe
from pc.integrations.huggingface.store import storage, tiers

LFM2 = HYBRIDS[1]


cached = functools.partial(generate_cases.cached, max_new_tokens=4)


@pytest.mark.parametrize("family", first_quick(HYBRIDS), ids=lambda f: f.name)
def test_hybrids_go_on_from_states(family: Family) -> None:
    model = remembering(family)
    document = prompt(70)
    with enabled(model, num_blocks=64) as handle:
        for seed, reused in ((1, 0), (2, 0), (3, 64)):  # the second keeps states where it differs from the first
            assert_same(model, input_ids=torch.cat([document, prompt(20, seed)], 1))
            assert handle.last_requests[0].cached_tokens == reused
        question = torch.cat([document, prompt(20, 4)], 1)
        assert count_computed(model, input_ids=question, max_new_tokens=1) == 26
        want, got = both(
            model, input_ids=torch.cat([document, prompt(20, 5)], 1), return_dict_in_generate=True, output_logits=True
        )
        for a, b in zip(want.logits, got.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert_same(model, **left_padded(torch.cat([document, prompt(9, 6)], 1), prompt(33, 7)))
        assert_same(model, **left_padded(torch.cat([document, prompt(9, 6)], 1), prompt(33, 7)), num_beams=2)


def test_states_in_float32_of_a_bfloat16_model_are_compared_as_its_other_values() -> None:
    """Mamba rounds the inputs of its states to bfloat16, and keeps the states and its logits in float32."""
    model = remembering(generate_cases.BY_NAME["mamba"]).to(torch.bfloat16)
    with enabled(model, num_blocks=64) as handle:
        assert handle.unsupported is None
        for reused in (0, 32):
            model.generate(prompt(40), max_new_tokens=2)
            assert handle.last_requests[0].cached_tokens == reused


@pytest.mark.parametrize("family", first_quick(HYBRIDS), ids=lambda f: f.name)
def test_explanation_of_a_hybrid_names_the_group_that_lacks_a_state(family: Family) -> None:
    model, document = remembering(family), prompt(70)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        model.generate(torch.cat([document, prompt(20, 1)], 1), max_new_tokens=2)
        other = torch.cat([document, prompt(20, 2)], 1)
        found = handle.explain(other)
        lacking = {miss.kind: (miss.matched, miss.reason, miss.position) for miss in found.groups}
        assert (found.matched, found.reason) == (0, "window")
        assert lacking["FullAttention"] == (64, None, None)
        assert lacking["Recurrent"] == (0, "state", 64)
        model.generate(other, max_new_tokens=2)  # keeps a state where it differs from the first
        assert handle.explain(torch.cat([document, prompt(20, 3)], 1)).matched == 64


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda f: f.name)
def test_next_round_of_a_hybrids_chat_goes_on_behind_the_answer(family: Family) -> None:
    model = remembering(family)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        first = assert_same(model, input_ids=prompt(40), max_new_tokens=30, eos_token_id=None)
        assert_same(model, input_ids=torch.cat([first, prompt(5, 1)], 1))
        assert handle.last_requests[0].cached_tokens == 64


def test_states_that_are_lost_show(storages: list[Any]) -> None:
    model = remembering(HYBRIDS[0])
    document = prompt(70)
    with enable_prefix_caching(model, num_blocks=64):
        for seed in (1, 2):
            model.generate(torch.cat([document, prompt(20, seed)], 1), max_new_tokens=2)
        for state in storages[0].states.tensors.values():
            state.zero_()
        ids = torch.cat([document, prompt(20, 3)], 1)
        want, got = both(model, input_ids=ids, return_dict_in_generate=True, output_logits=True, max_new_tokens=1)
        assert (want.logits[0] - got.logits[0]).abs().max() > 1e-3


def test_states_are_blocks_of_the_manager() -> None:
    model = remembering(LFM2)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert cached(model, handle, prompt(70)) == 0
        kv, states = handle.manager.pools
        assert (kv.num_cached, states.num_cached) == (4, 1)
        assert cached(model, handle, prompt(70)) == 64
        assert cached(model, handle, torch.cat([prompt(40), prompt(30, 1)], 1)) == 0
        assert states.num_cached == 3  # where the prompts differ, and at the end of each
        assert cached(model, handle, torch.cat([prompt(40), prompt(30, 2)], 1)) == 32
        assert_nothing_held(handle)
        handle.reset()
        assert cached(model, handle, prompt(70)) == 0


def few_states(model: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Give caches of this model room for `count` states."""
    size = sum(state.nbytes for state in probe(model).states.values())
    monkeypatch.setattr(storage, "memory_budget", lambda model: 4 * count * size)


def test_policy_and_hints_govern_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model = remembering(LFM2)
    few_states(model, monkeypatch, 3)
    kept = []
    for returns in (None, 0.0):
        with enabled(model, num_blocks=64, policy="priority") as handle:
            for seed in range(2):
                cached(model, handle, prompt(40, seed))
            with handle.hint(returns):
                cached(model, handle, prompt(40, 2))
            cached(model, handle, prompt(40, 3))
            kv, states = handle.manager.pools
            assert [pool.residency.totals()[0].sum() for pool in (kv, states)] == [0, 1]
            kept.append(cached(model, handle, prompt(40)))
    assert kept == [0, 32]


def test_more_rows_than_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model = remembering(LFM2)
    few_states(model, monkeypatch, 1)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for _ in range(2):
            assert_same(model, **left_padded(prompt(40), prompt(60, 1), prompt(20, 2)), max_new_tokens=20)
            assert_nothing_held(handle)
        assert handle.stats().calls_served == 2


def test_states_come_back_past_blocks_that_are_cached() -> None:
    model = remembering(LFM2)
    with enable_prefix_caching(model, num_blocks=16, host_blocks=64, policy="arc") as handle:
        for turn in range(2):
            for seed in range(3):
                assert cached(model, handle, prompt(150, seed)) == 144 * turn
                assert_nothing_held(handle)


def test_keys_and_values_are_copied_only_as_far_as_there_are_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copied = remembering(LFM2), []
    monkeypatch.setattr(tiers, "host_copy", lambda content: copied.append(content) or content)
    with enable_prefix_caching(model, num_blocks=64, host_blocks=64) as handle:
        assert cached(model, handle, prompt(150)) == 0
        assert cached(model, handle, torch.cat([prompt(100), prompt(50, 1)], 1)) == 0
        assert not copied


def test_states_outlast_their_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model = remembering(LFM2)
    with enabled(model, num_blocks=8, host_blocks=64) as handle:
        for seed in range(3):
            cached(model, handle, prompt(70, seed))
        kv, states = (pool.residency.totals()[0].sum() for pool in handle.manager.pools)
        assert kv > states == 0
        assert cached(model, handle, prompt(70)) == 64


def test_answers_of_several_rows_leave_their_states() -> None:
    model = remembering(LFM2)
    with enabled(model, num_blocks=64) as handle:
        rows = assert_same(
            model, input_ids=prompt(40), max_new_tokens=30, eos_token_id=None, do_sample=True, num_return_sequences=2
        )
        assert not torch.equal(*rows)
        for row in rows:
            assert cached(model, handle, torch.cat([row[None], prompt(5, 1)], 1)) == 64
