"""Every public name has a docstring with an example that runs, as `help()` and the reference show it."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import itertools
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pc

pytestmark = pytest.mark.quick  # each page, name and command

MODULES = (
    "pc",
    "pc.cache",
    "pc.cache.tiers.disk",
    "pc.cache.observe.events",
    "pc.cache.observe.metrics",
    "pc.cache.tiers.mooncake",
    "pc.cache.policies",
    "pc.cache.replay",
    "pc.cache.tiers.tier",
    "pc.cache.tiers.memory",
    "pc.cache.tiers.writer",
    "pc.check",
    "pc.flash_attn",
    "pc.integrations.huggingface",
    "pc.integrations.sglang",
    "pc.integrations.vllm",
)
BY_METHOD = ("CacheManager", "EncoderCache", "PrefixCaching", "TensorCache")
"""Classes whose methods are used alone, so that each has its own example. Others have one for the class."""
GO_ON = ("EncoderCache", "PrefixCaching", "TensorCache")
"""Classes whose methods' examples continue the class's example, so that they need no model or cache of their own."""
NEEDS = {"pc.cache.observe.events": ("zmq", "msgpack"), "pc.cache.observe.metrics": ("prometheus_client",)}


def public_names(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("__")]
    named = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    return [n for n, v in named if inspect.isclass(v) and v.__module__ == module.__name__ and not is_annotation(v)]


def is_annotation(value: type) -> bool:
    """Return whether a class is a protocol of others' objects, which is only used in annotations."""
    return getattr(value, "_is_protocol", False) and not getattr(value, "_is_runtime_protocol", False)


def documented() -> Iterator[tuple[str, Any, str]]:
    """Yield each public object once, with the name that imports it and its module."""
    seen: set[int] = set()
    for path in MODULES:
        if path.endswith("huggingface") and importlib.util.find_spec("transformers") is None:
            continue
        module = importlib.import_module(path)
        for name in public_names(module):
            value = typing.get_origin(getattr(module, name)) or getattr(module, name)
            if id(value) in seen or not (inspect.isclass(value) or callable(value)):
                continue
            seen.add(id(value))
            yield f"{path}.{name}", value, path
            if inspect.isclass(value) and name in BY_METHOD:
                for method, function in vars(value).items():
                    if not method.startswith("_") and not isinstance(function, property):
                        yield f"{path}.{name}.{method}", getattr(value, method), path


DOCUMENTED = list(documented())


def test_the_walk_finds_the_interface() -> None:
    names = {name for name, _, _ in DOCUMENTED}
    aliases = {"pc.GroupedAllocation", "pc.GroupedCacheManager"}
    assert {f"pc.{name}" for name in pc.__all__ if callable(getattr(pc, name))} - names == aliases
    assert {"pc.CacheManager.commit", "pc.TensorCache.join", "pc.paged_attention_with_lse"} <= names
    assert {"pc.cache.tiers.disk.DiskTier", "pc.cache.observe.events.EventPublisher", "pc.cache.policies.LRU"} <= names


@pytest.mark.parametrize(("name", "value", "module"), DOCUMENTED, ids=[name for name, _, _ in DOCUMENTED])
def test_an_example_runs(name: str, value: Any, module: str) -> None:
    for needed in NEEDS.get(module, ()):
        pytest.importorskip(needed)
    run_example(name, inspect.getdoc(value) or "", inspect.isclass(value))


def test_the_example_of_the_aliases_runs() -> None:
    """An alias has no docstring at run time, so the example of both is read from the source."""
    body = ast.parse(inspect.getsource(pc.cache)).body
    after = {node.targets[0].id: doc for node, doc in itertools.pairwise(body) if isinstance(node, ast.Assign)}
    doc = ast.literal_eval(after["GroupedCacheManager"].value)
    assert "pc.GroupedAllocation" in doc
    run_example("pc.GroupedCacheManager", inspect.cleandoc(doc), True)


def run_example(name: str, doc: str, is_class: bool) -> None:
    assert "\nExamples:\n" in doc, f"{name} has no example"
    manager = pc.CacheManager(num_blocks=8, block_size=4)  # as the examples of its methods say
    names = {"pc": pc, "torch": torch, "np": np, "manager": manager, "__name__": "__example__"}
    example = doctest.DocTestParser().get_doctest(doc, names, name, None, 0)
    assert len(example.examples) >= 1
    holder, _, last = name.rpartition(".")
    assert last in "".join(e.source for e in example.examples) or is_class
    if (of := holder.rpartition(".")[2]) in GO_ON:
        before = inspect.getdoc(getattr(importlib.import_module(holder.rpartition(".")[0]), of)) or ""
        example.examples[:0] = doctest.DocTestParser().get_examples(before)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)
