"""The plugin's entry point: nothing until it is asked, and only for versions it was written for."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import omni
import pytest

from pc.integrations import vllm as adapter
from pc.integrations.vllm import versions

ROOT = Path(__file__).parents[3]


def test_nothing_is_imported_until_asked(monkeypatch):
    monkeypatch.delenv("PC_VLLM", raising=False)
    code = (
        "import sys; from pc.integrations.vllm import register; register(); "
        "print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_names_it():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (target,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = target.partition(":")
    assert getattr(sys.modules[module], name) is adapter.register


@pytest.mark.parametrize("names", ["attention,evictions", "Attention", "all"])
def test_a_name_that_is_no_feature(monkeypatch, names):
    asked = []
    monkeypatch.setattr("pc.integrations.vllm.features.check_version", asked.append)
    monkeypatch.setenv("PC_VLLM", names)
    with pytest.raises(ValueError, match=r"PC_VLLM: got '.*', needs some of attention"):
        adapter.register()
    assert asked == [], "a feature was looked at before all names were"


def test_spaces_and_empty_names_are_passed_over(monkeypatch):
    done = []
    monkeypatch.setattr("pc.integrations.vllm.features.check_version", lambda name: done.append(("checked", name)))
    monkeypatch.setitem(adapter.FEATURES, "attention", lambda: done.append("enabled"))
    monkeypatch.setenv("PC_VLLM", " attention ,, ")
    adapter.register()
    assert done == [("checked", "attention"), "enabled"]


def pretend(monkeypatch, version, **modules):
    """A vLLM of this version, with these modules: a name with dots, and what is in it."""
    fake = types.ModuleType("vllm")
    fake.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "0.33", "dev", "", "0.3.2"])
def test_versions_out_of_range_are_refused_with_the_range(monkeypatch, version):
    pretend(monkeypatch, version)
    monkeypatch.setitem(versions.INTERFACES, "attention", {})
    if version == "0.33":
        versions.check_version("attention")
        return
    with pytest.raises(adapter.UnsupportedVersionError, match=r"needs 0\.32 to 0\.33"):
        versions.check_version("attention")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0rc1"])
def test_a_missing_or_changed_interface_is_named(monkeypatch, version):
    def build(self, prefix, metadata):
        pass

    holder = type("Builder", (), {"build": build})
    pretend(monkeypatch, version, fake_vllm={"Builder": holder})
    monkeypatch.setitem(versions.INTERFACES, "attention", {"fake_vllm:Builder.build": "self prefix metadata"})
    versions.check_version("attention")
    for name, said in (
        ("fake_vllm:Builder.make", "fake_vllm:Builder.make: not there"),
        ("fake_nothing:Builder", "fake_nothing:Builder: not there"),
    ):
        monkeypatch.setitem(versions.INTERFACES, "attention", {name: "self"})
        with pytest.raises(adapter.UnsupportedVersionError, match=said):
            versions.check_version("attention")
    monkeypatch.setitem(versions.INTERFACES, "attention", {"fake_vllm:Builder.build": "self fast_build metadata"})
    with pytest.raises(adapter.UnsupportedVersionError, match="has no fast_build, needed by vllm"):
        versions.check_version("attention")


@pytest.mark.parametrize("version", ["0.29.1", "0.31.0"])
def test_another_vllm_omni_is_refused_with_its_range(monkeypatch, version):
    fake = types.ModuleType("vllm_omni")
    fake.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm_omni", fake)
    with pytest.raises(adapter.UnsupportedVersionError, match=rf"vllm_omni: got {version}, needs 0\.30 to 0\.30"):
        versions.check_version("omni")


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(adapter.UnsupportedVersionError, match="pip install 'vllm>="):
        versions.check_version("attention")


@pytest.mark.parametrize("feature", list(versions.INTERFACES))
def test_the_installed_version_is_served(feature):
    pytest.importorskip("vllm", reason="vllm is not installed: make vllm")
    if versions.PACKAGES.get(feature) == "vllm_omni":
        omni.use_omni()
    versions.check_version(feature)
    if feature in adapter.FEATURES:  # a connector is named in vLLM's own options
        adapter.enable(feature)
        adapter.enable(feature)
