"""An editable install is a path to a link tree, which type checkers follow."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def backend(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LINKS", tmp_path / "links")
    return module


def test_links_lead_to_the_folders_and_the_front_door(backend, tmp_path, monkeypatch):
    root = tmp_path / "checkout"
    for path in ("_pc/__init__.py", "cache/keys.py", "triton_ops/a.py", "integrations/b.py", "_pc/demo/c.py"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    monkeypatch.setattr(backend, "ROOT", root)
    monkeypatch.setattr(backend, "LINKS", root / ".typecheck")
    backend.make_links()
    (root / "_pc" / "__init__.py").rename(root / "_pc" / "front.py")
    (root / "cache" / "new.py").touch()
    backend.make_links()
    package = root / ".typecheck" / "pc"
    assert sorted(entry.name for entry in package.iterdir()) == [
        "cache",
        "demo",
        "front.py",
        "integrations",
        "triton_ops",
    ]
    assert (package / "cache" / "new.py").samefile(root / "cache" / "new.py")
    assert not (package / "demo").readlink().is_absolute()


def test_an_editable_wheel_holds_metadata_and_a_path(backend, tmp_path):
    info = tmp_path / "pc_kernels-0.1.0.dist-info"
    (info / "licenses").mkdir(parents=True)
    (info / "METADATA").write_text("Name: pc-kernels\n")
    (info / "licenses" / "LICENSE").write_text("free\n")
    name = backend.build_editable(str(tmp_path), None, str(info))
    with zipfile.ZipFile(tmp_path / name) as wheel:
        files = {entry: wheel.read(entry) for entry in wheel.namelist()}
    record = files[f"{info.name}/RECORD"].decode().splitlines()
    assert sorted(line.split(",")[0] for line in record) == sorted(files)
    for entry, digest, size in (line.split(",") for line in record if not line.endswith(",,")):
        right = base64.urlsafe_b64encode(hashlib.sha256(files[entry]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={right}", len(files[entry]))
    assert f"{info.name}/licenses/LICENSE" in files
    assert Path(files["pc_kernels.pth"].decode().strip(), "pc", "__init__.py").samefile(ROOT / "_pc" / "__init__.py")


def test_all_else_is_setuptools(backend):
    from setuptools import build_meta

    assert backend.build_wheel == build_meta.build_wheel
    with pytest.raises(AttributeError):
        backend.build_nothing  # noqa: B018
