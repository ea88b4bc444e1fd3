"""Every declared private name of SGLang: if it is absent or has other parameters, SGLang's own code serves."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from pc.integrations import seam
from pc.integrations.sglang import api, features

NAMES = [
    (feature, name)
    for feature in api.NAMES
    for table in (api.REGISTRATION[feature], api.NAMES[feature])
    for name in seam.names(table)
]


@pytest.mark.quick
@pytest.mark.parametrize(("feature", "name"), NAMES, ids=lambda value: getattr(value, "path", value))
@pytest.mark.parametrize("change", ["gone", "other parameters"])
def test_a_name_that_is_not_as_declared_turns_off_its_feature(monkeypatch, feature, name, change):
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    if change == "other parameters" and name.parameters is None:
        pytest.skip("relies on no parameters")
    find = seam.find

    def without(path):
        if path != name.path:
            return find(path)
        if change == "gone":
            raise AttributeError(path)
        return lambda one_more, *given: None

    monkeypatch.setattr(seam, "find", without)
    monkeypatch.setattr(seam, "_assigns", lambda holder, attribute: f"{holder}.{attribute}" != name.path)
    for each in api.NAMES:
        needs = name.path in [other.path for other_feature, other in NAMES if other_feature == each]
        assert (name.path in api.why_not(each)) == needs


def test_a_body_that_changed_turns_off_eviction(monkeypatch):
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    core = seam.find(api.PATHS["UnifiedTreeCore"])

    def evict_device_start(self, component_type, request_cnt):
        return request_cnt + 1

    monkeypatch.setattr(core, "evict_device_start", evict_device_start)
    assert "evict_device_start: its body is not the one of 0.5.23" in api.why_not("eviction")
    assert api.why_not("attention") == ""


class Registry:
    """A double of SGLang's options, which records its calls."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(features, "_enabled", set())
        self.backends, self.cores, self.policies = {}, {}, {}
        monkeypatch.setattr(api, "register_backend", self.backends.__setitem__)
        monkeypatch.setattr(api, "register_core", self.cores.__setitem__)
        monkeypatch.setattr(api, "register_policies", self._register)

    def _register(self, names, make_cache, refuse):
        self.policies = dict.fromkeys(names, refuse)
        self.make_cache = make_cache


def test_sglangs_own_backend_serves_in_place_of_ours(monkeypatch, caplog, one_rank):
    """If a class of SGLang lacks a method, `pc` remains a valid name, torch_native computes, and the log says why."""
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang_batches import Scene

    registry = Registry(monkeypatch)
    monkeypatch.delattr(AttentionBackend, "init_forward_metadata_in_graph")
    with caplog.at_level(logging.WARNING, "sglang.pc"):
        features.enable("attention", fallback="warn")
        backend = registry.backends["pc"](Scene(16).runner())
    assert type(backend) is TorchNativeAttnBackend
    assert all("init_forward_metadata_in_graph: not there" in record.message for record in caplog.records)
    assert len(caplog.records) == 2


def test_a_runner_without_an_attribute_is_served_by_sglang(monkeypatch, caplog, one_rank):
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    from sglang_batches import Scene

    registry = Registry(monkeypatch)
    monkeypatch.setattr(api, "stock_backend", lambda runner: "SGLang's")
    features.enable("attention", fallback="warn")
    runner = Scene(16).runner()
    assert type(registry.backends["pc"](runner)).__name__ == "PagedAttnBackend"
    del runner.kv_cache_dtype
    with caplog.at_level(logging.WARNING, "sglang.pc"):
        assert registry.backends["pc"](runner) == "SGLang's"
    assert "runner: has no kv_cache_dtype" in caplog.text


def test_what_no_table_foresees_is_served_by_sglang_too(monkeypatch, caplog, one_rank):
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    from sglang_batches import Scene

    registry = Registry(monkeypatch)
    monkeypatch.setattr(api, "stock_backend", lambda runner: "SGLang's")
    features.enable("attention", fallback="warn")
    with caplog.at_level(logging.WARNING, "sglang.pc"), monkeypatch.context() as patch:
        patch.setattr("pc.integrations.sglang.attention.get_exec", lambda: SimpleNamespace())
        assert registry.backends["pc"](Scene(16).runner()) == "SGLang's"
    assert "AttributeError: 'types.SimpleNamespace' object has no attribute 'deterministic'" in caplog.text
    runner = Scene(16).runner()
    runner.use_mla_backend = True
    with pytest.raises(ValueError, match="does not support: multi-head latent attention"):
        registry.backends["pc"](runner)


def test_sglangs_own_lru_evicts_in_place_of_ours(monkeypatch, caplog):
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    registry = Registry(monkeypatch)
    monkeypatch.delattr(UnifiedTreeCore, "_split_node")
    with caplog.at_level(logging.WARNING, "sglang.pc"):
        features.enable("eviction", fallback="warn")
    assert "_split_node: not there" in caplog.text
    assert registry.cores == {}
    assert set(registry.policies.values()) == {None}, "SGLang's lru answers for every name"

    @dataclasses.dataclass
    class Params:
        eviction_policy: str

    @dataclasses.dataclass
    class Context:
        params: Params
        disable_radix_cache: bool = False

    context = Context(Params("pc_default"))
    assert registry.make_cache(context, lambda given: given.params.eviction_policy) == "lru"
    assert registry.make_cache(Context(Params("lfu")), lambda given: given.params.eviction_policy) == "lfu"
    assert context.params.eviction_policy == "pc_default"
