"""The model that most tests ask, and what they see of the inside of a cache without asking its handle."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from generate_cases import LLAMA

from pc.integrations.huggingface import api
from pc.integrations.huggingface.store import kept as store
from pc.integrations.tested import release

BATCHING = "continuous batching"
NEEDS = {
    "batching/": BATCHING,
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
    "test_prompts_are_computed_in_the_chunks": api.CHUNKS,
    "test_chunked_prefill": api.CHUNKS,
    "test_latent_rows": api.SPARSE,  # of the versions that keep latent rows as they are
}
"""By a part of a test's name, the feature without which it cannot pass."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of features that the installed transformers is too old for, as calls do."""
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
def storages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What blocks hold, of each cache that is made in this test."""
    made: list[Any] = []
    make = store.model_storage

    def model_storage(*arguments: Any) -> Any:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(store, "model_storage", model_storage)
    return made


@pytest.fixture(autouse=True)
def _nothing_deprecated(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No line of ours uses an older name of a cache; transformers logs that once a process, and warns of others."""
    log = logging.getLogger("transformers")
    log.addHandler(caplog.handler)
    type(log).warning_once.cache_clear()
    yield
    log.removeHandler(caplog.handler)
    assert "Use `cache` instead" not in caplog.text
