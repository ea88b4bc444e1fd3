"""The plugin's entry point: it registers what is asked for once, and leaves the rest to SGLang's own code."""

from __future__ import annotations

import logging
import subprocess
import sys
import types

import pytest

from pc.integrations import sglang as adapter
from pc.integrations import tested
from pc.integrations.sglang import api, features


@pytest.fixture
def registered(monkeypatch):
    """Return what is registered and logged, in order; nothing reaches SGLang."""
    done = []
    monkeypatch.setattr(features, "_enabled", set())
    monkeypatch.setattr(features, "announce", done.append)
    monkeypatch.setattr(api, "why_not", lambda name, **objects: "")
    monkeypatch.setattr(api, "can_register", lambda name: True)
    for name in adapter.FEATURES:
        monkeypatch.setitem(adapter.FEATURES, name, lambda name=name: f"{name} (--option)")
    return done


def pretend(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(__version__=version))
    monkeypatch.setitem(api.NAMES, "attention", {})
    monkeypatch.setitem(api.REGISTRATION, "attention", {})


def test_features_are_registered_and_logged_once(monkeypatch, registered):
    monkeypatch.setenv("PC_SGLANG", " eviction,, attention,eviction ")
    adapter.register()
    adapter.register()
    assert registered == ["registered eviction (--option); attention (--option)"]


def test_a_program_that_asks_is_refused_what_it_cannot_get(monkeypatch, registered):
    def refuse(name):
        raise adapter.UnsupportedVersionError(f"{name} is of another time")

    monkeypatch.setattr(features, "check_version", refuse)
    with pytest.raises(adapter.UnsupportedVersionError, match="attention is of another time"):
        adapter.enable("attention", "eviction")
    with pytest.raises(ValueError, match=r"fallback: got 'maybe', needs 'warn' or 'raise'"):
        adapter.enable("attention", fallback="maybe")
    with pytest.raises(ValueError, match=r"PC_SGLANG: got 'attentoin', needs some of attention, eviction"):
        adapter.enable("eviction", "attentoin", fallback="warn")
    assert registered == []


@pytest.mark.parametrize("knows", [True, False])
def test_a_missing_name_turns_off_its_feature_alone(monkeypatch, registered, caplog, knows):
    monkeypatch.setattr(api, "why_not", lambda name, **objects: "engine:Part: not there" if name == "eviction" else "")
    monkeypatch.setattr(api, "can_register", lambda name: knows or name != "eviction")
    monkeypatch.setenv("PC_SGLANG", "eviction,attention")
    with caplog.at_level(logging.WARNING, "sglang.pc"):
        adapter.register()
    served = "eviction (--option); attention (--option)" if knows else "attention (--option)"
    assert registered == [f"registered {served}"]
    assert [record.message for record in caplog.records] == [
        "eviction is off, and SGLang's own code runs in its place: engine:Part: not there"
        if knows
        else "eviction is off, and SGLang's options do not know its names: engine:Part: not there"
    ]


@pytest.mark.parametrize("version", ["0.5.22", "0.4.0", "dev", ""])
def test_older_versions_are_refused_with_the_range(monkeypatch, version):
    pretend(monkeypatch, version)
    with pytest.raises(adapter.UnsupportedVersionError, match=rf"sglang: got {version}, needs 0\.5\.23$"):
        adapter.check_version("attention")


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.24", "0.6.0"])
def test_newer_versions_are_tried(monkeypatch, caplog, version):
    pretend(monkeypatch, version)
    monkeypatch.setattr(tested, "installed", lambda package: version)
    monkeypatch.setattr(tested, "_said", set())
    with caplog.at_level(logging.WARNING, "pc"):
        adapter.check_version("attention")
    lines = [record.message for record in caplog.records]
    assert lines == ([] if version.startswith("0.5.23") else [
        f"sglang {version} is newer than 0.5.23, the newest that was tested; pc tries it, and calls that it "
        "cannot serve fall back"
    ])  # fmt: skip


def test_without_sglang_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(adapter.UnsupportedVersionError, match=r"pip install 'sglang>=0\.5\.23,<0\.5\.24'"):
        adapter.check_version("eviction")


@pytest.mark.parametrize("feature", list(api.NAMES))
def test_the_installed_version_is_served(feature):
    pytest.importorskip("sglang", reason="sglang is not installed: make sglang")
    assert set(api.NAMES) == set(api.REGISTRATION) == set(api.ATTRIBUTES) == set(adapter.FEATURES)
    adapter.check_version(feature)


def test_names_are_known_to_sglangs_options():
    """The test runs in its own process, because registrations are permanent."""
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
