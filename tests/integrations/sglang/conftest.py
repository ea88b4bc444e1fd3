"""Fixtures of the tests that need SGLang, which `make sglang` runs. Without SGLang they are skipped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def _nan_filled_empty():
    """Override the NaN fill: SGLang masks the content of its `torch.empty` buffers, but relies on it being finite."""


@pytest.fixture
def one_rank(monkeypatch):
    """Set SGLang's process-wide settings that backends read, without an engine."""
    parallel = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_cp_size=1)
    execution = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setattr("pc.integrations.sglang.attention.get_parallel", lambda: parallel)
    monkeypatch.setattr("pc.integrations.sglang.attention.get_exec", lambda: execution)
    return parallel
