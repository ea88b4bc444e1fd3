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
    with _lock:
        return _search(_about(device, shape, use), device, shape, use)


@functools.cache
def _search(about: str, device: torch.device, shape: Shape, use: str) -> Row | None:
    """Check kernels, or find the file that says that all were right; `about` is what the result holds for."""
    path = _path(about)
    if path is not None and os.path.exists(path):
        return None
    fault = next((row for row in check_kernels(device, small=shape, uses=(use,)) if not row.ok), None)
    if fault is None and path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(about, encoding="utf-8")
    return fault


forget_checks = _search.cache_clear
"""Forget the results that this process knows."""


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
