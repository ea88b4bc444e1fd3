"""The plugin's entry point: it enables what is asked for once, and only for supported versions."""

from __future__ import annotations

import logging
import sys
import types

import omni
import pytest

from pc.integrations import vllm as adapter
from pc.integrations.vllm import api, features


def test_spaces_and_empty_names_are_passed_over(monkeypatch):
    done = []
    monkeypatch.setattr("pc.integrations.vllm.features.check_version", lambda name: done.append(("checked", name)))
    monkeypatch.setitem(adapter.FEATURES, "attention", lambda: done.append("enabled"))
    monkeypatch.setattr("pc.integrations.vllm.api.call_after_configuration", lambda complete: None)
    monkeypatch.setattr("pc.integrations.vllm.features._enabled", set())
    monkeypatch.setenv("PC_VLLM", " attention ,, ")
    adapter.register()
    assert done == [("checked", "attention"), "enabled"]


@pytest.mark.parametrize("version", ["0.31.2", "0.33", "0.34.0", "1.0.0", "dev", "", "0.3.2"])
def test_versions_out_of_range_are_refused_with_the_range(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version))
    monkeypatch.setitem(api.NAMES, "attention", {})
    if version in ("0.33", "0.34.0", "1.0.0"):  # newer versions are tried
        api.check_version("attention")
        return
    with pytest.raises(adapter.UnsupportedVersionError, match=r"needs 0\.32 to 0\.33"):
        api.check_version("attention")


def test_an_older_vllm_omni_is_refused_with_its_range(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_omni", types.SimpleNamespace(__version__="0.29.1"))
    with pytest.raises(adapter.UnsupportedVersionError, match=r"vllm-omni: got 0\.29\.1, needs 0\.30$"):
        api.check_version("omni")


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(adapter.UnsupportedVersionError, match="pip install 'vllm>="):
        api.check_version("attention")


@pytest.mark.parametrize("feature", list(api.NAMES))
def test_the_installed_version_is_served(monkeypatch, feature):
    pytest.importorskip("vllm", reason="vllm is not installed: make vllm")
    if api.PACKAGES.get(feature) == "vllm-omni":
        omni.use_omni()
        omni.restore_later(monkeypatch)
    monkeypatch.setattr(features, "_enabled", set())
    installed = tuple(map(int, sys.modules["vllm"].__version__.split(".")[:2]))
    if installed < api.SINCE.get(feature, installed):
        with pytest.raises(adapter.UnsupportedVersionError, match=r"vllm: got .*, needs 0\.33"):
            api.check_version(feature)
        return
    api.check_version(feature)
    if feature in adapter.FEATURES:  # vLLM's own options name a connector
        adapter.enable(*features.NEEDS.get(feature, ()), feature)
        adapter.enable(feature, fallback="raise")  # again


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PC_VLLM_POLICY": "nonsense"}, "PC_VLLM_POLICY: got 'nonsense', needs one of .*lru"),
        ({"PC_VLLM": "attention,compression"}, "PC_VLLM: got compression without eviction, which it needs"),
        ({"PC_VLLM": "eviction", "PC_VLLM_POLICY": "nonsense"}, "PC_VLLM_POLICY: got 'nonsense'"),
        ({"PC_VLLM_REUSE": "gaps"}, "PC_VLLM_REUSE: got 'gaps', needs one of prefix, gap, anywhere"),
        (
            {f"{features.VARIABLE}_POLCY": "lru"},
            "PC_VLLM_POLCY: got an unknown variable, needs .*, PC_VLLM_REUSE",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused_before_anything_is_enabled(monkeypatch, variables, message):
    done = []
    monkeypatch.setattr("pc.integrations.vllm.features.check_version", done.append)
    monkeypatch.setattr(features, "_enabled", set())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        adapter.register()
    assert done == []


def configuration(scheduler=None, worker="vllm.v1.worker.cpu_worker.CPUWorker", **additional):
    """Return the part of vLLM's configuration that is read."""
    return types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(scheduler_cls=scheduler),
        parallel_config=types.SimpleNamespace(worker_cls=worker),
        additional_config=additional,
    )


OURS = {
    "scheduler": "pc.integrations.vllm.eviction.AsyncPolicyScheduler",
    "worker": "pc.integrations.vllm.hidden_states.HiddenStatesWorker",
}


def test_options_that_nothing_reads_are_refused(monkeypatch):
    features.check_options(configuration())
    features.check_options(configuration(**OURS, pc_policy="lru", pc_hidden_states_bytes=1, other=2))
    features.check_options(configuration("my.Scheduler", "my.Worker", pc_policy="lru", pc_hidden_states_bytes=1))
    with pytest.raises(ValueError, match="pc_policy: got one for vLLM's own scheduler, needs PC_VLLM=eviction"):
        features.check_options(configuration(worker=OURS["worker"], pc_policy="lru"))
    with pytest.raises(ValueError, match="pc_hidden_states_device: got one for vLLM's own worker"):
        features.check_options(configuration(OURS["scheduler"], pc_hidden_states_device="cpu"))
    with pytest.raises(ValueError, match="additional_config: got 'pc_polcy', needs some of pc_policy"):
        features.check_options(configuration(**OURS, pc_polcy="lru"))
    with pytest.raises(ValueError, match="pc_reuse: got 'gaps', needs one of prefix, gap, anywhere"):
        features.check_options(configuration(**OURS, pc_reuse="gaps"))
    with pytest.raises(ValueError, match="pc_reuse: got one for vLLM's own scheduler, needs PC_VLLM=eviction"):
        features.check_options(configuration(pc_reuse="gap"))
    with pytest.raises(ValueError, match="pc_chunk: got one for vLLM's own scheduler, needs PC_VLLM=eviction"):
        features.check_options(configuration(pc_chunk=128))
    monkeypatch.setenv("PC_VLLM_REUSE", "prefix")
    with pytest.raises(ValueError, match="PC_VLLM_REUSE: got 'prefix' for vLLM's own scheduler"):
        features.check_options(configuration())
    monkeypatch.setenv("PC_VLLM_POLICY", "lru")
    features.check_options(configuration(**OURS))
    with pytest.raises(ValueError, match="PC_VLLM_POLICY: got 'lru' for vLLM's own scheduler, needs PC_VLLM=eviction"):
        features.check_options(configuration())


def test_one_line_says_what_is_in_use(monkeypatch, logged):
    pytest.importorskip("vllm", reason="vllm is not installed: make vllm")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    lines = logged(logging.INFO)
    monkeypatch.setenv("PC_VLLM_POLICY", "priority")
    monkeypatch.setenv("PC_VLLM_REUSE", "prefix")
    monkeypatch.delitem(sys.modules, "vllm_omni.core.prefix_cache", raising=False)
    adapter.enable("attention")
    for _ in range(2):
        features.announce(configuration(**OURS, pc_hidden_states_bytes=1 << 20))
    (line,) = lines
    assert line.startswith("pc ")
    for part in (
        "vllm 0.",
        "attention (PagedAttentionBackend as CPU_ATTN)",
        "eviction (AsyncPolicyScheduler, policy priority: Priority, reuse prefix)",
        "hidden_states (HiddenStatesWorker, pc_hidden_states_bytes=1048576)",
    ):
        assert part in line
    AttentionBackendEnum.CPU_ATTN.clear_override()
    assert "attention" not in features.describe(configuration())
    assert "no feature is in use" in features.describe(configuration())


def test_a_scheduler_that_vllm_chose_stays(monkeypatch, warnings):
    """VLLM has its own scheduler for diffusion models."""
    pytest.importorskip("vllm", reason="vllm is not installed: make vllm")
    monkeypatch.setattr(features, "_enabled", {"eviction"})
    chosen = "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"
    config = configuration(chosen)
    config.model_config = None
    features._complete(config)
    assert config.scheduler_config.scheduler_cls == chosen
    assert any(line.startswith("eviction is off") and line.endswith(f"got the scheduler {chosen}") for line in warnings)


def test_attention_replaces_what_an_earlier_engine_chose():
    pytest.importorskip("vllm", reason="vllm is not installed: make vllm")
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import _cached_get_attn_backend, get_attn_backend

    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
    with set_current_vllm_config(VllmConfig()):
        assert get_attn_backend(64, torch.float32, "auto").__name__ == "CPUAttentionBackend"
        adapter.enable("attention")
        assert get_attn_backend(64, torch.float32, "auto").__name__ == "PagedAttentionBackend"
    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
