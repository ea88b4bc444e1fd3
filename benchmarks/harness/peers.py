"""Other projects to measure beside ours: their wheels, unpacked, from a folder; nothing is installed."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from pathlib import Path


def add_peers(folder: Path) -> list[str]:
    """Make the packages of a folder importable, after everything that is installed.

    Args:
        folder: Folder of wheels, which are unpacked once, or of unpacked wheels.

    Returns:
        The distributions in the folder, as "name version".
    """
    for wheel in sorted(folder.glob("**/*.whl")):
        target = folder / "unpacked" / wheel.name.removesuffix(".whl")
        if not (target / ".done").exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            (target / ".done").touch()
    found = sorted({info.parent for info in folder.glob("**/*.dist-info")})
    sys.path.extend(str(path) for path in found if str(path) not in sys.path)
    return [
        f"{distribution.metadata['Name']} {distribution.version}"
        for path in found
        for distribution in importlib.metadata.distributions(path=[str(path)])
    ]
