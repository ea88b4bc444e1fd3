"""The plugin's entry point: what it is asked for, once, and only for versions it was written for."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from pc.integrations import sglang as adapter
from pc.integrations.sglang import features, versions


def test_features_are_registered_once_and_said(monkeypatch):
    done = []
    monkeypatch.setattr(features, "_enabled", set())
    monkeypatch.setattr(features, "check_version", lambda name: done.append(f"checked {name}"))
    monkeypatch.setattr(features, "announce", done.append)
    for name in adapter.FEATURES:
        monkeypatch.setitem(adapter.FEATURES, name, lambda name=name: f"{name} (--option)")
    monkeypatch.setenv("PC_SGLANG", " eviction,, attention,eviction ")
    adapter.register()
    adapter.register()
    assert done == [
        *("checked eviction", "checked attention"),
        "registered eviction (--option); attention (--option)",
    ]


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "0.5.23.post1", "dev", "0.5.23"])
def test_versions_out_of_range_are_refused_with_the_range(monkeypatch, version):
    fake = types.ModuleType("sglang")
    fake.__version__ = version
    monkeypatch.setitem(sys.modules, "sglang", fake)
    monkeypatch.setitem(versions.INTERFACES, "attention", {})
    if version.startswith("0.5.23"):
        versions.check_version("attention")
        return
    with pytest.raises(adapter.UnsupportedVersionError, match=rf"sglang: got {version}, needs 0\.5\.23$"):
        versions.check_version("attention")


def test_without_sglang_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(adapter.UnsupportedVersionError, match=r"pip install 'sglang>=0\.5\.23,<0\.5\.24'"):
        versions.check_version("eviction")


@pytest.mark.parametrize("feature", list(versions.INTERFACES))
def test_the_installed_version_is_served(feature):
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    assert set(versions.INTERFACES) == set(adapter.FEATURES)
    versions.check_version(feature)


def test_names_are_known_to_sglangs_options():
    """In a process of its own: what is registered stays."""
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    code = (
        "from pc.integrations.sglang import enable; enable('attention', 'eviction'); "
        "from sglang.srt.arg_groups import choices; "
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as made; "
        "print('pc' in choices.ATTENTION_BACKEND_CHOICES, 'pc' in made, "
        "{'pc_lru', 'pc_default'} <= set(choices.RADIX_EVICTION_POLICY_CHOICES))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True True"
