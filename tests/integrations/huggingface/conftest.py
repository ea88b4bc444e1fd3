"""Fixtures of the HuggingFace tests, and the features of transformers that tests need."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from generate_cases import LLAMA

from pc.integrations.huggingface import PrefixCaching, api, enable_prefix_caching, layers
from pc.integrations.huggingface.runners import batch
from pc.integrations.huggingface.store import kept as store
from pc.integrations.huggingface.store import storage
from pc.integrations.tested import release

BATCHING = "continuous batching"
NEEDS = {
    "batching/": BATCHING,
    "[batching-": BATCHING,
    "test_batching_is_refused": BATCHING,
    "test_each_name_of_continuous_batching": BATCHING,
    "[sparse attention": api.SPARSE,
    "test_scan.py": api.STATES,
    "test_states.py": api.STATES,
    "qwen3-next": api.STATES,
    "lfm2": api.STATES,
    "jamba": api.STATES,
    "mamba": api.STATES,
    "test_images.py": api.IMAGES,
    "image": api.IMAGES,
    "assisted": api.ASSISTED,
    "prompt lookup": api.ASSISTED,
    "test_drafts_that_are_rejected": api.ASSISTED,
    "test_the_package_as_a_command": api.ASSISTED,  # it expects that no feature is lacking
    "test_prompts_are_computed_in_the_chunks": api.CHUNKS,
    "prints_what_is_lacking": api.CHUNKS,
    "test_latent_rows": api.SPARSE,  # only these versions cache latent rows without expanding them
}
"""For a part of a test's name: the feature that the test needs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of features for which the installed transformers is too old."""
    framework = api.look()
    disabled = {*framework.disabled}
    if release(framework.version)[:2] < api.OLDEST_BATCHING:
        disabled.add(BATCHING)
    for item in items if disabled else ():
        needed = [feature for part, feature in NEEDS.items() if part in item.nodeid and feature in disabled]
        if "integrations/huggingface" in item.nodeid and needed:
            item.add_marker(pytest.mark.skip(reason=f"transformers {framework.version} has no {needed[0]}"))


@pytest.fixture
def model() -> Any:
    return LLAMA.build()


@pytest.fixture
def handle(model: Any) -> Iterator[PrefixCaching]:
    with enable_prefix_caching(model, num_blocks=64) as handle:
        yield handle


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks, buffers and kept tokens small, so that short prompts behave like long ones."""
    monkeypatch.setattr(batch, "CHUNK", 32)
    monkeypatch.setattr(storage, "CHUNK", 32)
    monkeypatch.setattr(batch, "ROOM", 16)
    monkeypatch.setattr(layers.GrowingWindowLayer, "slack", 16)


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The `ModelStorage` of each cache that the test makes, in order."""
    made: list[Any] = []
    make = store.model_storage

    def model_storage(*arguments: Any) -> Any:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(store, "model_storage", model_storage)
    return made


@pytest.fixture(autouse=True)
def _nothing_deprecated(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that no code here uses a deprecated name of a cache, which transformers logs once in a process."""
    log = logging.getLogger("transformers")
    log.addHandler(caplog.handler)
    type(log).warning_once.cache_clear()
    yield
    log.removeHandler(caplog.handler)
    assert "Use `cache` instead" not in caplog.text
