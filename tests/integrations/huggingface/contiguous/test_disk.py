"""Blocks on disk are read after eviction and by later processes, and never by another model."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import generate_cases
import pytest
import torch
from generate_cases import LLAMA, assert_same, prompt

from pc.cache.tiers.disk import DiskTier
from pc.integrations.huggingface import enable_prefix_caching

cached = functools.partial(generate_cases.cached, max_new_tokens=4)


def _scaled(model: Any) -> Any:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 0.5
    return model


def _hooked(model: Any) -> Any:
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, inputs, output: output * 1.5)
    return model


def _set(model: Any) -> Any:
    model.model.layers[0].self_attn.scaling *= 1.5
    return model


@pytest.mark.parametrize("change", [_scaled, _hooked, _set, lambda m: m.to(torch.float64)])
def test_blocks_of_another_model_are_not_read(tmp_path: Path, change: Any) -> None:
    with enable_prefix_caching(model := LLAMA.build(), disk=tmp_path) as handle:
        cached(model, handle, prompt(64))
    other = change(LLAMA.build())
    with enable_prefix_caching(other, disk=tmp_path) as handle:
        assert cached(other, handle, prompt(64)) == 0
    with enable_prefix_caching(other, disk=tmp_path, block_size=8) as handle:
        assert cached(other, handle, prompt(64)) == 0


@pytest.mark.parametrize("change", [_scaled, _hooked, _set])
def test_model_that_changes_leaves_its_blocks(tmp_path: Path, change: Any) -> None:
    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=8, disk=tmp_path) as handle:
        for seed in range(3):
            cached(model, handle, prompt(64, seed))
        change(model)
        for seed in range(3):
            assert cached(model, handle, prompt(64, seed)) == 0
    with enable_prefix_caching(model := LLAMA.build(), disk=tmp_path) as handle:
        assert cached(model, handle, prompt(64)) == 63
        assert handle.stats().hit_tokens_by_cause == {"prefix": 63, "gap": 0, "partial": 0}
        assert cached(model, handle, prompt(64)) == 63
        assert handle.stats().hit_tokens == 2 * 63


def test_damaged_files_and_a_full_directory(tmp_path: Path) -> None:
    model = LLAMA.build()
    with enable_prefix_caching(model, disk=tmp_path) as handle:
        cached(model, handle, prompt(64))
    files = sorted(tmp_path.rglob("*.block"))
    assert len(files) == 4
    for path in files:
        assert path.stat().st_mode & 0o077 == 0
        path.write_bytes(path.read_bytes()[:-3])
    size = files[0].stat().st_size
    with enable_prefix_caching(model, disk=tmp_path) as handle, pytest.warns(RuntimeWarning, match="dropped"):
        assert cached(model, handle, prompt(64)) == 0
    with enable_prefix_caching(model, disk=tmp_path, disk_bytes=size * 3 + 100) as handle:
        cached(model, handle, prompt(200, 1))
    assert 0 < len(list(tmp_path.rglob("*.block"))) <= 3


def test_writing_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()
    replace, slow = os.replace, []

    def slowly(*args: Any) -> None:
        time.sleep(0.02)
        slow.append(time.perf_counter())
        replace(*args)

    monkeypatch.setattr(os, "replace", slowly)
    handle = enable_prefix_caching(model, num_blocks=8, disk=tmp_path)
    for seed in range(3):
        cached(model, handle, prompt(64, seed))
    assert cached(model, handle, prompt(64)) == 63  # hits blocks whose write has not ended
    handle.disable()
    assert len(list(tmp_path.rglob("*.block"))) == len(slow) == 12


def test_blocks_that_another_call_evicts_during_disable_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory then holds other text, which was once written under the old hash."""
    model, put, written = LLAMA.build(), DiskTier.put, []

    def put_while_a_call_runs(self: DiskTier, key: bytes, tensors: Any) -> bool:
        if not written:
            manager.allocate("of another thread", range(8 * 16))
            for tensor in store.storage.parts[0].tensors.values():
                tensor.fill_(7.0)
        written.append(key)
        return put(self, key, tensors)

    handle = enable_prefix_caching(model, num_blocks=8, disk=tmp_path)
    manager, store = handle.manager, handle.store
    assert_same(model, input_ids=prompt(64))
    monkeypatch.setattr(DiskTier, "put", put_while_a_call_runs)
    handle.disable()
    monkeypatch.setattr(DiskTier, "put", put)
    assert 0 < len(written) < 4
    with enable_prefix_caching(model, num_blocks=64, disk=tmp_path):
        assert_same(model, input_ids=prompt(64))
