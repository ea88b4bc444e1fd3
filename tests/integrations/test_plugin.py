"""What plugins of engines share."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from pc.integrations.plugin import check_features, features_in_environment, wrap_once


def test_a_method_is_wrapped_once_and_keeps_its_signature():
    def method(value, *, times=1):
        return [value] * times

    owner, calls = SimpleNamespace(method=method), []

    def wrap(theirs):
        def ours(*args, **kwargs):
            calls.append(args)
            return theirs(*args, **kwargs)

        return ours

    for _ in range(2):
        wrap_once(owner, "method", wrap)
    assert owner.method(7, times=2) == [7, 7]
    assert calls == [(7,)]
    assert inspect.signature(owner.method) == inspect.signature(method)


def test_names_are_all_looked_at_before_a_version(monkeypatch):
    monkeypatch.setenv("TEST_FEATURES", " one, ,two ")
    names = features_in_environment("TEST_FEATURES")
    assert names == ["one", "two"]
    checked = []
    with pytest.raises(ValueError, match="TEST_FEATURES: got 'two', needs some of one, three"):
        check_features("TEST_FEATURES", ("one", "three"), names, checked.append)
    assert checked == []
    check_features("TEST_FEATURES", ("one", "two"), names, checked.append)
    assert checked == names
