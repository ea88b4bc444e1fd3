"""Enabling continuous batching: which models and options raise, copies of a model, and the model after disable."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
import transformers
from batching_cases import LLAMA, alone, batched, tokens
from generate_cases import SMALL
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.generation.continuous_batching import cache, continuous_api

from pc.cache import CacheStats
from pc.integrations import seam, tested
from pc.integrations.huggingface import UnsupportedError, api, enable_continuous_batching

PROMPTS = [tokens(40, 1), tokens(9, 2)]


@pytest.fixture
def model() -> Any:
    return LLAMA.build()


def test_disable_restores_the_model(model: Any) -> None:
    before, settings = dict(vars(model)), model.config.to_dict()
    batching = enable_continuous_batching(model, num_blocks=32, block_size=8)
    assert isinstance(batching.stats(), CacheStats)
    assert "workload_hints" in inspect.signature(model.init_continuous_batching).parameters
    with pytest.raises(ValueError, match=r"call disable\(\) on its handle, model\.init_continuous_batching\.handle,"):
        enable_continuous_batching(model)
    assert model.init_continuous_batching.handle is batching
    batched(model, PROMPTS)
    for _ in range(2):
        batching.disable()
    assert vars(model) == before
    assert model.config.to_dict() == settings
    with enable_continuous_batching(model, num_blocks=32) as again:
        assert again.stats().total_requests == 0
        batching.disable()  # of a handle that is no longer installed
        assert "init_continuous_batching" in vars(model)


def test_copies(model: Any) -> None:
    want = alone(model, PROMPTS)
    with enable_continuous_batching(model, num_blocks=32) as batching:
        for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            assert batched(other, PROMPTS, page_size=16, num_blocks=32, max_batch_tokens=64) == want
            with enable_continuous_batching(other, num_blocks=32) as own:
                assert batched(other, PROMPTS) == want
                assert own.stats().total_requests == 2
        assert batching.stats().total_requests == 0


def test_compiled_model(model: Any) -> None:
    compiled = torch.compile(model, backend="eager")
    with enable_continuous_batching(compiled, num_blocks=32):
        assert batched(compiled, PROMPTS) == alone(model, PROMPTS)


def test_model_goes_away() -> None:
    model = LLAMA.build()
    batching = enable_continuous_batching(model, num_blocks=32)
    batched(model, PROMPTS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    batching.disable()
    assert batching.stats().total_requests == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks: got 0, needs at least 1"),
        ({"num_blocks": True}, TypeError, "num_blocks: got bool, needs an int"),
        ({"block_size": 3}, ValueError, "block_size: got 3, needs at least 4"),
        ({"block_size": None}, TypeError, "block_size: got NoneType, needs an int"),
        ({"policy": "none"}, ValueError, "policy"),
    ],
)
def test_bad_arguments(model: Any, options: dict[str, Any], error: type, message: str) -> None:
    before = dict(vars(model))
    with pytest.raises(error, match=message):
        enable_continuous_batching(model, **options)
    assert vars(model) == before


def test_not_a_model() -> None:
    with pytest.raises(TypeError, match="needs a transformers model with generate"):
        enable_continuous_batching(torch.nn.Linear(1, 1))


def test_layers_with_a_state_are_refused() -> None:
    config = transformers.Qwen3NextConfig(
        **SMALL, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"Invalid layer type: linear_attention.*issue 48305"):
        enable_continuous_batching(transformers.Qwen3NextForCausalLM(config).eval())


@pytest.mark.parametrize("processes", [1, 2])
def test_several_processes_are_refused(model: Any, processes: int) -> None:
    backend, store = ("gloo", torch.distributed.HashStore()) if processes == 1 else ("fake", FakeStore())
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=processes)
    try:
        if processes == 1:
            with enable_continuous_batching(model, num_blocks=32) as batching:
                assert batched(model, PROMPTS) == alone(model, PROMPTS)
                assert batching.stats().calls_served == 1
            return
        with pytest.raises(UnsupportedError, match="several processes generate together"):
            enable_continuous_batching(model)
    finally:
        torch.distributed.destroy_process_group()


def test_kept_manager_of_transformers_is_refused(model: Any) -> None:
    model._cached_continuous_batching_manager = object()
    with pytest.raises(ValueError, match="destroy_cached_continuous_batching_manager"):
        enable_continuous_batching(model)


@pytest.mark.parametrize("version", ["5.18.1", "4.57.6", "unknown"])
def test_other_versions_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(UnsupportedError, match=rf"transformers: got {version}, needs 5.19 to 5.24"):
        enable_continuous_batching(model)


@pytest.mark.parametrize("version", ["5.25.0", "6.0.0"])
def test_newer_versions_are_tried(model: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    monkeypatch.setattr(tested, "installed", {"transformers": version}.get)
    with enable_continuous_batching(model, num_blocks=8) as handle:
        assert handle.untested == f"transformers {version} is newer than 5.24, the newest that was tested"


def _with_one_more(method: Any) -> Any:
    """Return a method that also takes `optional`."""
    signature = inspect.signature(method)
    more = inspect.Parameter("optional", inspect.Parameter.KEYWORD_ONLY, default=None)

    def newer(*args: Any, optional: Any = None, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    newer.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    return newer


def test_other_interfaces_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare_next_batch(self: Any, more: int) -> bool:
        return False

    def new_method(self: Any) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(continuous_api.ContinuousBatchProcessor, "prepare_next_batch", prepare_next_batch)
        with pytest.raises(UnsupportedError, match=r"prepare_next_batch: also requires more.*5.19 to 5.24"):
            enable_continuous_batching(model)
    with monkeypatch.context() as patch:
        patch.setattr(cache.PagedAttentionCache, "new_method", new_method, raising=False)
        with pytest.raises(UnsupportedError, match=r"PagedAttentionCache.new_method\(self\) is not known"):
            enable_continuous_batching(model)
    for name in api.REPLACED:  # transformers may give a new parameter to a method that is replaced here
        holder = next(n.path.rpartition(".")[0] for n in seam.names(api.BATCHING_NAMES) if n.path.endswith(f".{name}"))
        method = getattr(seam.find(holder), name)
        with monkeypatch.context() as patch:
            patch.setattr(seam.find(holder), name, _with_one_more(method))
            with pytest.raises(UnsupportedError, match=rf"{name}\(.*optional\) is not known"):
                enable_continuous_batching(model)
    with monkeypatch.context() as patch:
        patch.setitem(api.BATCHING_NAMES, f"{api.PACKAGE}scheduler:Scheduler", "gone()")
        with pytest.raises(UnsupportedError, match=r"Scheduler.gone: not there"):
            enable_continuous_batching(model)
    enable_continuous_batching(model, num_blocks=8).disable()
