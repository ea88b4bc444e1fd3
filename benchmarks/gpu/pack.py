"""The results of a run of `make gpu` in one file, to be carried off a machine that is about to go away."""

from __future__ import annotations

import tarfile
from pathlib import Path


def pack(folder: Path, target: Path) -> Path:
    """Writes every file under a device's results into `target`, named by the folder; replaces what it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with tarfile.open(part, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, f"{folder.name}/{path.relative_to(folder).as_posix()}")
    part.replace(target)
    return target


def unpack(source: Path, results: Path) -> list[str]:
    """Puts packed results back under `results`; the names of the files."""
    with tarfile.open(source) as archive:
        archive.extractall(results, filter="data")
        return archive.getnames()
