"""Private names of transformers: if one is absent or has other arguments, calls give the same tokens."""

from __future__ import annotations

import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generate_cases import HYBRIDS, LLAMA, SPARSE, VOCAB, prompt
from image_cases import CASES, text

from pc.integrations import seam
from pc.integrations.huggingface import (
    UnsupportedError,
    api,
    enable_continuous_batching,
    enable_prefix_caching,
)

NAMES = [(feature, name) for feature, table in api.NAMES.items() for name in seam.names(table)]
EVERY = [
    pytest.param(feature, name, way, id=f"{feature}: {name.path.removeprefix('transformers.')} {way}")
    for feature, name in NAMES
    for way in ("gone", "changed")
    if way == "gone" or name.parameters
]


def make_gone(monkeypatch: pytest.MonkeyPatch, name: seam.Name) -> None:
    """Make a name impossible to find. The name itself stays, because plain generate needs most of them."""
    find, assigns = seam.find, seam._assigns

    def found(path: str) -> Any:
        if path == name.path:
            raise AttributeError(path)
        return find(path)

    monkeypatch.setattr(seam, "find", found)
    there = lambda path, member: f"{path}.{member}" != name.path and assigns(path, member)  # noqa: E731
    monkeypatch.setattr(seam, "_assigns", there)


def make_changed(monkeypatch: pytest.MonkeyPatch, name: seam.Name) -> None:
    """Replace a name by a function that does the same but has another parameter name."""
    original = seam.find(name.path)
    signature = inspect.signature(original)
    assert name.parameters
    variadic = {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }  # `seam` treats a function with both as a wrapper
    wraps = variadic <= {p.kind for p in signature.parameters.values()}
    parameters = [
        p.replace(name=f"{p.name}_now") if p.name == name.parameters[-1] else p
        for p in signature.parameters.values()
        if not (wraps and p.kind in variadic)
    ]

    def changed(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    if inspect.isclass(original):
        changed = type(original.__name__, (original,), {})
    changed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    holder, _, member = name.path.replace(":", ".").rpartition(".")
    module = name.path.partition(":")[0]
    target = seam.find(f"{module}:{name.path.partition(':')[2].rpartition('.')[0]}") if holder != module else None
    monkeypatch.setattr(target if target is not None else __import__(module, fromlist=[member]), member, changed)


def ask(model: Any, **options: Any) -> Iterator[torch.Tensor]:
    """Yield a greedy answer and a sampled one."""
    for sampled in (False, True):
        torch.manual_seed(3)
        yield model.generate(**{"max_new_tokens": 4, "do_sample": sampled, **options})


def of_llama(**options: Any) -> tuple[Any, dict[str, Any]]:
    return LLAMA.build(), {"input_ids": prompt(40), **options}


def stopped() -> tuple[Any, dict[str, Any]]:
    from pc.demo._models import train_tokenizer

    tokenizer = train_tokenizer("the quick brown fox jumps over the lazy dog " * 20, VOCAB)
    return of_llama(stop_strings=["fox"], tokenizer=tokenizer)


def with_image() -> tuple[Any, dict[str, Any]]:
    case = CASES[1]
    return case.build(), case.call([text(20, 1), 1, text(5, 2)])


def sparse() -> tuple[Any, dict[str, Any]]:
    if not hasattr(transformers, SPARSE.model):
        return of_llama()
    return SPARSE.build(), {"input_ids": prompt(40)}


CALLS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    api.CACHING: of_llama,
    api.ASSISTED: lambda: of_llama(prompt_lookup_num_tokens=3, do_sample=False),
    api.CHUNKS: lambda: of_llama(prefill_chunk_size=24),
    api.STATES: lambda: (HYBRIDS[0].build(), {"input_ids": prompt(40)}),
    api.SPARSE: sparse,
    api.IMAGES: with_image,
    api.STOPS: stopped,
    api.PACKED: of_llama,
}
"""By feature, a call that needs it."""


@functools.cache
def answered(feature: str) -> tuple[Any, dict[str, Any], list[torch.Tensor]]:
    """Return a feature's model, the arguments of its call, and the answers of plain generate."""
    model, options = CALLS[feature]()
    return model, options, list(ask(model, **options))


def test_every_feature_has_a_call() -> None:
    assert list(CALLS) == list(api.NAMES)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:prefix caching")
@pytest.mark.parametrize(("feature", "name", "way"), EVERY)
def test_each_name_falls_back_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, feature: str, name: seam.Name, way: str
) -> None:
    model, options, want = answered(feature)
    (make_gone if way == "gone" else make_changed)(monkeypatch, name)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert name.path in handle.framework.disabled[feature]
        assert handle.framework.version in handle.framework.disabled[feature]
        assert all(map(torch.equal, ask(model, **options), want))
        if feature == api.PACKED:
            with pytest.raises(ValueError, match="packed passes needs another transformers"):
                handle.compress(prompt(40))
            with pytest.raises(UnsupportedError):
                enable_continuous_batching(model)
            assert handle.stats().calls_served == 2
            return
        (reason,) = handle.stats().calls_handed_back
        assert "needs another transformers" in reason or "cache_implementation" in reason
        assert handle.stats().calls_served == 0
        if feature in (api.CACHING, api.STATES, api.SPARSE):  # the whole model needs the feature
            assert "needs another transformers" in str(handle.unsupported)


@pytest.mark.filterwarnings("ignore:prefix caching")
def test_a_release_whose_chunks_ignore_cached_tokens_serves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers before 5.21 computes the cached tokens again and appends them to the cache: other tokens."""
    model, options, want = answered(api.CHUNKS)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.20.2")
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert all(map(torch.equal, ask(model, **options), want))
        (reason,) = handle.stats().calls_handed_back
        assert reason.startswith("chunked prefill needs another transformers")
        assert "5.20.2" in handle.framework.disabled[api.CHUNKS]


BATCHING = [
    pytest.param(name, way, id=f"{name.path.removeprefix(api.PACKAGE)} {way}")
    for name in seam.names(api.BATCHING_NAMES)
    for way in ("gone", "changed")
    if way == "gone" or name.parameters
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "way"), BATCHING)
def test_each_name_of_continuous_batching(monkeypatch: pytest.MonkeyPatch, name: seam.Name, way: str) -> None:
    model, _, _ = answered(api.CACHING)
    (make_gone if way == "gone" else make_changed)(monkeypatch, name)
    with pytest.raises(UnsupportedError, match=name.path.rpartition(".")[2]):
        enable_continuous_batching(model, num_blocks=16)
    assert "init_continuous_batching" not in vars(model)  # transformers' own serves it


def test_a_release_without_a_class_can_be_imported(tmp_path: Path) -> None:
    """Without a class, the adapter is imported and says what is missing."""
    import subprocess

    script = """
import warnings
import torch
import transformers
from transformers import cache_utils
for name in ("DynamicIndexedLayer", "DynamicSlidingWindowLayer"):
    if hasattr(cache_utils, name):
        delattr(cache_utils, name)
import pc.integrations.huggingface as adapter
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    eos_token_id=None)).eval()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    handle = adapter.enable_prefix_caching(model, num_blocks=64)
    assert model.generate(torch.arange(3, 43)[None], max_new_tokens=2).shape == (1, 42)
print(handle.unsupported)
print(sorted(handle.framework.disabled))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert "DynamicSlidingWindowLayer" in done.stdout, done.stderr
    assert "sparse attention" in done.stdout


@pytest.mark.filterwarnings("error")
def test_the_package_as_a_command_prints_what_is_lacking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formerly the documented command printed a RuntimeWarning of Python and, if nothing was lacking, nothing else."""

    def printed() -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("pc.integrations.huggingface", run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    assert printed() == (0, f"transformers {transformers.__version__}: all features are served\n")
    feature, name = NAMES[-1]
    make_gone(monkeypatch, name)
    status, said = printed()
    assert status == 1
    assert said.startswith(f"{feature}: {name.path}")
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setitem(api.BATCHING_NAMES, f"{api.PACKAGE}scheduler:Scheduler", "gone()")
        status, said = printed()
        assert status == 1
        assert said.startswith(f"{api.BATCHING}: {api.PACKAGE}scheduler:Scheduler.gone: not there")
    api.look()
