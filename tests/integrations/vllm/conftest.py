"""Fixtures of the tests that need vLLM, which `make vllm` runs. Without vLLM they are skipped."""

from __future__ import annotations

import logging
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import vllm_engine
from vllm_models import SIZES, save_model

from pc.integrations.vllm.api import LOGGER

if find_spec("vllm") is not None:
    vllm_engine.prepare()


class _NeedsVLLM(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("vllm is not installed: make vllm", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the files of this folder without vLLM, except the one that tests what then happens."""
    skipped = find_spec("vllm") is None and module_path.name != "test_register.py"
    return _NeedsVLLM.from_parent(parent, path=module_path) if skipped else None


@pytest.fixture(autouse=True)
def _nan_filled_empty():
    """Override the NaN fill: vLLM masks the content of its `torch.empty` buffers, but relies on it being finite."""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """The folder of a tiny model for the engine, by name."""
    if find_spec("vllm._C") is None:
        pytest.skip("vLLM's compiled engine is not installed: make vllm")
    folder = tmp_path_factory.mktemp("models")
    return lambda name: save_model(name, folder)


@pytest.fixture(scope="session")
def model_with_tokenizer(model_path, tmp_path_factory):
    """The folder of a tiny model with a tokenizer, which servers and structured outputs need."""
    from pc.demo import _models

    folder = shutil.copytree(model_path("llama"), tmp_path_factory.mktemp("with_tokenizer") / "model")
    tokenizer = _models.train_tokenizer(_models.read_document(), SIZES["vocab_size"])
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def logged(monkeypatch):
    """Return a function that collects our logger's messages from a level on, whatever level vLLM has set."""

    def gather(level):
        vllms = pytest.importorskip("vllm.logger", reason="vllm is not installed: make vllm")
        for once in (vllms._print_info_once, vllms._print_warning_once):
            once.cache_clear()  # messages of earlier tests
        lines, handler, logger = [], logging.Handler(level), logging.getLogger(LOGGER)
        handler.emit = lambda record: lines.append(record.getMessage())
        monkeypatch.setattr(logger, "level", level)
        monkeypatch.setattr(logger, "_cache", {})  # cached levels
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
        return lines

    return gather


@pytest.fixture
def warnings(logged):
    """The warnings of our logger."""
    return logged(logging.WARNING)
