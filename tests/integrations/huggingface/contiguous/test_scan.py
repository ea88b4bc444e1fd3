"""Mamba-1: scans begin with the state of a cache, and all other scans are unchanged."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from generate_cases import BY_NAME, assert_same, both, count_computed, plain, prompt, remembering
from transformers.models.jamba import modeling_jamba

from pc.integrations.huggingface import enable_prefix_caching, layers

LOGITS = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 3}


def arguments(tokens: int) -> dict[str, Any]:
    """Return arguments of a scan in float64, whose initial state still matters at the last token."""
    draw = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    rows = {"hidden_states": random(2, 3, tokens), "dt": random(2, 3, tokens), "z": random(2, 3, tokens)}
    rows |= {"B": random(2, 4, tokens), "C": random(2, 4, tokens)}
    fixed = {"A": -0.05 * random(3, 4).exp(), "D": random(3), "delta_bias": random(3)}
    return rows | fixed | {"delta_softplus": True, "return_last_state": True}


@pytest.mark.parametrize("cut", [1, 300, 599])
def test_parts_of_a_scan_are_the_whole(monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    monkeypatch.setattr(layers, "SCAN_CHUNK", 64)
    own = layers._from_state(
        getattr(modeling_jamba.mamba_selective_scan, "_pc_original", modeling_jamba.mamba_selective_scan)
    )
    given = arguments(600)
    parts = [
        {n: v[..., part] if n in ("hidden_states", "dt", "z", "B", "C") else v for n, v in given.items()}
        for part in (slice(0, cut), slice(cut, None))
    ]
    want, want_state = own(**given)
    first, state = own(**parts[0])
    layer = layers.StateLayer()
    layer.update_conv_state(torch.zeros(2, 3, 4))
    layer.update_recurrent_state(state)
    with layers.from_states():
        layer.update_conv_state(torch.zeros(2, 3, 4))
        second, last = own(**parts[1])
        again, _ = own(**parts[1])  # a state affects only the next scan
    torch.testing.assert_close(torch.cat([first, second], -1), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, want_state, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(again, second)
    layer.update_conv_state(torch.zeros(2, 3, 4))  # outside of `from_states` nothing is added
    assert torch.equal(own(**parts[1])[0], again)


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_few_tokens_are_computed_behind_a_state_that_counts(name: str, storages: list[Any]) -> None:
    model = remembering(BY_NAME[name])
    with enable_prefix_caching(model, num_blocks=64) as handle:
        model.generate(prompt(70), max_new_tokens=2)
        ids = torch.cat([prompt(70)[:, :64], prompt(9, 1)], 1)
        want, got = both(model, input_ids=ids, **LOGITS)
        assert handle.last_requests[0].cached_tokens == 64
        torch.testing.assert_close(torch.stack(want.logits), torch.stack(got.logits), rtol=1e-3, atol=1e-3)
        assert count_computed(model, input_ids=torch.cat([prompt(70)[:, :64], prompt(9, 2)], 1), max_new_tokens=1) == 9
        for state in storages[0].states.tensors.values():
            state.zero_()
        lost = model.generate(torch.cat([prompt(70)[:, :64], prompt(9, 1)], 1), **LOGITS)
        assert (lost.logits[0] - want.logits[0]).abs().max() > 1e-3


def test_without_it_such_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_carried", lambda state, dt, decay, outputs: (torch.zeros_like(dt), 0 * state))
    model = remembering(BY_NAME["mamba"])
    with pytest.warns(UserWarning, match="falls back") as told, enable_prefix_caching(model) as handle:
        assert_same(model, input_ids=prompt(40))
    assert any("continues from a cached prefix" in str(w.message) for w in told)
    assert handle.unsupported


def test_a_pass_that_fails_leaves_no_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = remembering(BY_NAME["jamba"])
    want = plain(model, input_ids=prompt(50, 3))
    whole, armed, calls = modeling_jamba.causal_conv1d_fn, threading.Event(), []

    def failing(*args: Any, **kwargs: Any) -> Any:  # called after the state is set and before its scan
        if not armed.is_set():  # an event is not compared before each call, other than a list
            return whole(*args, **kwargs)
        calls.append(args)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(modeling_jamba, "causal_conv1d_fn", failing)  # before caching, as a part of the model
    with enable_prefix_caching(model, num_blocks=64) as handle:
        model.generate(prompt(70), max_new_tokens=2)
        armed.set()
        with pytest.raises(RuntimeError, match="in the middle"):
            model.generate(torch.cat([prompt(70)[:, :64], prompt(9, 1)], 1), max_new_tokens=2)
        armed.clear()
        assert calls
        assert handle.stats().calls_handed_back == {}
        assert torch.equal(plain(model, input_ids=prompt(50, 3)), want)
