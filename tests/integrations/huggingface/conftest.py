"""The model that most tests ask, and what they see of the inside of a cache without asking its handle."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from generate_cases import LLAMA

from pc.integrations.huggingface.contiguous import store


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
