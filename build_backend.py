"""setuptools as it is, except that an editable install is a path to a link tree, which type checkers see too.

The folders stay at the top level and are imported as `pc.triton_ops` and so on: setuptools would map them with an
import hook, which mypy and pyright do not run. `python build_backend.py` makes or renews the links alone.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
LINKS = ROOT / ".typecheck"
FOLDERS = ("triton_ops", "cache", "integrations")
WHEEL = "Wheel-Version: 1.0\nGenerator: build_backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("setuptools.build_meta"), name)


def make_links() -> None:
    """Makes `.typecheck/pc`, whose entries are links to the folders and to the files of the front door."""
    package = LINKS / "pc"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {folder: ROOT / folder for folder in FOLDERS}
    wanted |= {path.name: path for path in (ROOT / "_pc").iterdir() if path.name != "__pycache__"}
    for entry in package.iterdir():
        if entry.is_symlink() and entry.name not in wanted:
            entry.unlink()
    for name, target in wanted.items():
        link = package / name
        if not (link.is_symlink() and link.resolve() == target):
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, package))


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """PEP 660: a wheel of the metadata and of a path file that names the link tree."""
    make_links()
    with tempfile.TemporaryDirectory() as folder:
        if metadata_directory is None:
            setuptools = importlib.import_module("setuptools.build_meta")
            metadata_directory = str(
                Path(folder) / setuptools.prepare_metadata_for_build_wheel(folder, config_settings)
            )
        info = Path(metadata_directory)
        found = [path for path in info.rglob("*") if path.is_file()]
        files = {path.relative_to(info.parent).as_posix(): path.read_bytes() for path in found}
    files |= {f"{info.name}/WHEEL": WHEEL.encode(), "pc_kernels.pth": f"{LINKS}\n".encode()}
    files.pop(f"{info.name}/RECORD", None)
    record = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    ]
    files[f"{info.name}/RECORD"] = "".join([*record, f"{info.name}/RECORD,,\n"]).encode()
    wheel = f"{info.name.removesuffix('.dist-info')}-0.editable-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory) / wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


if __name__ == "__main__":
    make_links()
