"""Common code of the engines' plugins: they do nothing until asked, and know all features' names before any runs."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pc.integrations import sglang, vllm
from pc.integrations.seam import UnsupportedVersionError, check_features, features_in_environment, wrap_once

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
each = pytest.mark.parametrize("plugin", [sglang, vllm], ids=["sglang", "vllm"])


@pytest.mark.parametrize(("plugin", "group"), [(sglang, "sglang.srt.plugins"), (vllm, "vllm.general_plugins")])
def test_the_entry_point_names_it(plugin, group):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    (target,) = project["entry-points"][group].values()
    module, _, name = target.partition(":")
    assert getattr(sys.modules[module], name) is plugin.register


@each
@pytest.mark.quick
@pytest.mark.parametrize("names", ["attention,evictions", "Attention", "all"])
def test_a_name_that_is_no_feature(monkeypatch, plugin, names):
    asked, variable = [], plugin.features.VARIABLE
    monkeypatch.setattr(plugin.features, "check_version", asked.append)
    monkeypatch.setenv(variable, names)
    with pytest.raises(ValueError, match=rf"{variable}: got '.*', needs some of attention, {[*plugin.FEATURES][1]}"):
        plugin.register()
    assert asked == [], "a feature was looked at before all names were"


@each
@pytest.mark.parametrize("names", [["eviction"], {"eviction": True}, None, 3], ids=str)
def test_an_argument_that_is_no_name(monkeypatch, plugin, names):
    asked, variable = [], plugin.features.VARIABLE
    monkeypatch.setattr(plugin.features, "check_version", asked.append)
    monkeypatch.setattr(plugin.features, "_enabled", {"attention"})
    with pytest.raises(ValueError, match=f"{variable}: got {re.escape(repr(names))}, needs some of attention, "):
        plugin.features.enable("attention", names)
    assert asked == []


def test_a_method_is_wrapped_once_and_keeps_its_signature():
    def method(value, *, times=1):
        return [value] * times

    owner, calls = SimpleNamespace(method=method), []

    def ours(theirs, *args, **kwargs):
        calls.append(args)
        return theirs(*args, **kwargs)

    for _ in range(2):
        wrap_once(owner, "method", ours)
    assert owner.method(7, times=2) == [7, 7]
    assert calls == [(7,)]
    assert inspect.signature(owner.method) == inspect.signature(method)


def test_names_are_all_looked_at_before_a_version(monkeypatch):
    monkeypatch.setenv("TEST_FEATURES", " one, ,two ")
    names = features_in_environment("TEST_FEATURES")
    assert names == ["one", "two"]
    checked = []
    with pytest.raises(ValueError, match="TEST_FEATURES: got 'two', needs some of one, three"):
        check_features("TEST_FEATURES", ("one", "three"), names, "warn", checked.append)
    assert checked == []
    with pytest.raises(ValueError, match="fallback: got 'maybe', needs 'warn' or 'raise'"):
        check_features("TEST_FEATURES", ("one", "two"), names, "maybe", checked.append)
    assert checked == []
    assert check_features("TEST_FEATURES", ("one", "two"), names, "raise", checked.append) == {"one": "", "two": ""}
    assert checked == names


def test_reasons_against_features_are_returned_or_raised():
    def check(name):
        if name != "two":
            raise UnsupportedVersionError(f"no {name}")

    reasons = check_features("TEST_FEATURES", ("one", "two"), ["two", "one"], "warn", check)
    assert reasons == {"two": "", "one": "no one"}
    with pytest.raises(UnsupportedVersionError, match="no one"):
        check_features("TEST_FEATURES", ("one", "two"), ["two", "one"], "raise", check)
