"""Other projects to measure beside ours: their wheels, unpacked, from a folder; nothing is installed."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def add_peers(folder: Path) -> None:
    """Make the packages of a folder importable, after everything that is installed.

    Args:
        folder: Folder of wheels, which are unpacked once, or of unpacked wheels.
    """
    for wheel in sorted(folder.glob("**/*.whl")):
        target = folder / "unpacked" / wheel.name.removesuffix(".whl")
        if not (target / ".done").exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            (target / ".done").touch()
    found = sorted({str(info.parent) for info in folder.glob("**/*.dist-info")})
    sys.path.extend(path for path in found if path not in sys.path)
