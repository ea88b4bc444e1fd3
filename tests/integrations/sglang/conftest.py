"""Fixtures of the tests that need SGLang; `make sglang` runs them, elsewhere they are skipped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def _nan_filled_empty():
    """SGLang relies on what its `torch.empty` buffers hold in places that it then masks: not the case under test."""


@pytest.fixture
def one_rank(monkeypatch):
    """What backends ask of SGLang's process-wide settings, without an engine."""
    parallel = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_cp_size=1)
    execution = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setattr("pc.integrations.sglang.attention.get_parallel", lambda: parallel)
    monkeypatch.setattr("pc.integrations.sglang.attention.get_exec", lambda: execution)
    return parallel
