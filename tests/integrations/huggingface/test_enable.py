"""The handle: salts, counts, copies of a model, deleted models, and interrupted calls."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from calls import calls_within
from generate_cases import LLAMA, NEW_TOKENS, assert_same, cached, cached_each, plain, prompt

from pc.cache import CacheManager
from pc.integrations.huggingface import PrefixCaching, RequestReport, enable_prefix_caching
from pc.integrations.huggingface.admit import PromptRequests
from pc.integrations.huggingface.identity import Identity
from pc.integrations.huggingface.probe import probe
from pc.integrations.huggingface.prompts import Prompt
from pc.integrations.huggingface.settings import CacheOptions
from pc.integrations.huggingface.store.kept import PromptStore


def test_salts_share_nothing(model: Any, handle: PrefixCaching) -> None:
    assert cached(model, handle) == 0
    for salt in ("a", "b", b"a", 7):
        with handle.salt(salt):
            assert cached_each(model, handle) == [0, 39]
    assert cached(model, handle) == 39
    with pytest.raises(TypeError, match="salt: got list"), handle.salt(["a"]):
        pass
    with pytest.raises(RuntimeError, match="on purpose"), handle.salt("c"):
        raise RuntimeError("on purpose")
    assert cached(model, handle) == 39


def test_a_call_within_one_block_costs_nothing(
    model: Any, handle: PrefixCaching, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached(model, handle) == 0
    before, called = handle.stats(), []
    with monkeypatch.context() as patch:
        for owner, name in ((CacheManager, "allocate"), (Identity, "changed")):
            patch.setattr(owner, name, lambda *a, **k: called.append(a))
        assert_same(model, input_ids=prompt(9), max_new_tokens=7)
        assert handle.last_requests == [RequestReport(9, 0)]
        assert not called
    assert handle.stats() == dataclasses.replace(before, calls_served=2)
    model.model.layers[0].mlp.up_proj.weight.data.neg_()
    assert_same(model, input_ids=prompt(8), max_new_tokens=8)
    assert cached(model, handle) == 0  # a short call notices the change first; the long one still empties the cache
    assert_same(model, input_ids=prompt(9), max_new_tokens=8)  # begins with a cached block, ends at a block's end
    assert handle.last_requests == [RequestReport(9, 8, ((0, 8),))]


def test_copies_can_be_enabled(model: Any, handle: PrefixCaching) -> None:
    want = plain(model, input_ids=prompt(40))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.generate(prompt(40), max_new_tokens=NEW_TOKENS), want)
        assert other.generate.__self__ is other
        with enable_prefix_caching(other, num_blocks=64) as own:
            assert cached_each(other, own) == [0, 39]
    assert handle.stats().total_requests == 0
    shallow = copy.copy(model)
    shallow.generation_config = copy.deepcopy(model.generation_config)
    shallow.generation_config.max_new_tokens = 3
    assert shallow.generate(prompt(40)).shape == (1, 43)
    assert "max_new_tokens" not in inspect.signature(model.generate).parameters
    assert "inputs" in inspect.signature(model.generate).parameters


def test_the_replaced_generate_is_copied_and_looked_into_as_a_bound_method(model: Any, handle: PrefixCaching) -> None:
    bound, want = type(model).generate.__get__(model), plain(model, input_ids=prompt(40))
    copied = copy.deepcopy({"model": model, "generate": model.generate})
    assert copied["generate"].__self__ is copied["model"]
    pickled = pickle.loads(pickle.dumps(functools.partial(model.generate, max_new_tokens=NEW_TOKENS)))
    for generate in (copied["generate"], pickled, types.MethodType(model.generate.__func__, model)):
        assert torch.equal(generate(prompt(40), max_new_tokens=NEW_TOKENS), want)
    # Users find the function without `torch.no_grad` in the closure.
    assert model.generate.__closure__ is bound.__closure__
    assert model.generate.__code__ is bound.__code__
    assert handle.stats().total_requests == 0


def test_compiled_model(model: Any) -> None:
    compiled = torch.compile(model, backend="eager")
    with enable_prefix_caching(compiled, num_blocks=64) as handle:
        for _ in range(2):
            got = compiled.generate(prompt(40), max_new_tokens=NEW_TOKENS)
            assert torch.equal(got, plain(model, input_ids=prompt(40)))
        assert handle.last_requests[0].cached_tokens == 39


@pytest.mark.slow
def test_a_module_is_compiled_while_its_model_is_served(model: Any) -> None:
    want = plain(model, input_ids=prompt(40))
    with enable_prefix_caching(model, num_blocks=64) as handle:
        model.model = torch.compile(model.model, backend="eager")
        for cached in (0, 39):
            assert torch.equal(model.generate(prompt(40), max_new_tokens=NEW_TOKENS), want)
            assert handle.last_requests[0].cached_tokens == cached
        assert handle.stats().calls_handed_back == {}


def test_model_goes_away_at_once(storages: list[Any]) -> None:
    model = LLAMA.build()
    handle = enable_prefix_caching(model, num_blocks=64)
    model.generate(prompt(40), max_new_tokens=2)
    generate, blocks, gone = model.generate, weakref.ref(storages.pop()), weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
        assert blocks() is None
    finally:
        gc.enable()
    handle.disable()
    with pytest.raises(RuntimeError, match="was deleted"):
        generate(prompt(4))


@pytest.mark.parametrize("method", ["reset", "disable"])
def test_emptied_while_a_call_runs(model: Any, method: str) -> None:
    class Streamer:
        count = 0

        def put(self, value: Any) -> None:
            self.count += 1
            if self.count == 4:
                getattr(handle, method)()

        def end(self) -> None:
            pass

    handle = enable_prefix_caching(model, num_blocks=64)
    want = plain(model, input_ids=prompt(40))
    assert torch.equal(model.generate(prompt(40), max_new_tokens=NEW_TOKENS, streamer=Streamer()), want)
    assert_same(model, input_ids=prompt(40))
    handle.disable()


def test_an_interrupt_that_leaves_gradients_off_is_mended(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the exit of `torch.no_grad`, before it restores the mode."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with enable_prefix_caching(model, num_blocks=24):
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients), monkeypatch.context() as patch:
                patch.setattr(torch.no_grad, "__exit__", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    model.generate(prompt(20), max_new_tokens=2)
                assert torch.is_grad_enabled() == gradients


def test_requests_of_an_interrupted_call_run_no_code_in_which_an_interrupt_would_be_swallowed(model: Any) -> None:
    store = PromptStore(model, CacheOptions(8, 4), probe(model))
    requests = [PromptRequests(store, ())]
    requests[0].admit(Prompt("a", np.arange(6), 0, [0]))
    assert calls_within(requests.clear) == (None, [])
    store.sweep()
    assert store.manager.stats().num_requests == 0
