"""The model that most tests ask, and what they see of the inside of a cache without asking its handle."""

from __future__ import annotations

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
