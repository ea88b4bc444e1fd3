"""A search for the first wrong kernel that a model needs, run once for each device. Results are remembered."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import threading
from pathlib import Path

import torch

from .._core.runtime import INTERPRET
from . import Row, Shape, check_kernels, runs_kernels

_known: dict[str, Row | None] = {}
_lock = threading.Lock()


def first_fault(device: torch.device, shape: Shape, use: str) -> Row | None:
    """Return the first kernel that is wrong on a device for a use, or None if all are right.

    If all are right, a file records this for all processes of the user. A fault is remembered in this process only;
    another process checks again. An unreadable or unwritable folder is not an error.

    Args:
        device: The device on which kernels would run. If PyTorch computes the operators there, nothing is checked.
        shape: The model's attention layers.
        use: The purpose, one of `USES`.
    """
    if not runs_kernels(device):
        return None
    about = _about(device, shape, use)
    with _lock:
        if about not in _known:
            path = _path(about)
            fault: Row | None = None
            if path is None or not os.path.exists(path):
                rows = check_kernels(device, small=shape, uses=(use,))
                fault = next((row for row in rows if not row.ok), None)
                if fault is None and path is not None:
                    with contextlib.suppress(OSError):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_text(about, encoding="utf-8")
            _known[about] = fault
        return _known[about]


def forget_checks() -> None:
    """Forget the results that this process knows."""
    with _lock:
        _known.clear()


def _about(device: torch.device, shape: Shape, use: str) -> str:
    """Return the versions, device and layers that a result holds for, as text."""
    name: list[object]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = [properties.name, torch.cuda.get_device_capability(device), torch.version.cuda, torch.version.hip]
    else:
        name = ["cpu", "interpreter" if INTERPRET else "compiled"]
    versions = [torch.__version__, importlib.metadata.version("triton"), _code()]
    return json.dumps([versions, name, [str(shape.dtype), *shape[1:]], use])


@functools.cache
def _code() -> str:
    """Return a digest of this package's source, which changes more often than its version."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _path(about: str) -> Path | None:
    """Return the file of a result; None if there is no home directory."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "pc" / "checked" / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
