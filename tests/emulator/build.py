"""Compiles C and C++ once per content, into a folder of this user's."""

from __future__ import annotations

import ctypes
import functools
import getpass
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = [
    "-O2",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-mavx2",
    "-mf16c",
    "-mfma",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-class-memaccess",
]


@functools.cache
def folder() -> Path:
    """Return the folder of compiled files. EMULATOR_BUILD names another one."""
    path = Path(os.environ.get("EMULATOR_BUILD") or Path(tempfile.gettempdir()) / f"pc-emulator-{getpass.getuser()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def compiled(name: str, command: Sequence[str], sources: Sequence[Path], headers: Sequence[Path] = ()) -> Path:
    """Return a shared library made from sources. `command` lacks them and the output."""
    content = hashlib.sha256(" ".join(command).encode())
    for path in sorted((*sources, *headers)):
        content.update(path.read_bytes())
    target = folder() / content.hexdigest()[:16] / name
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(part), *map(str, sources)], check=True)
        part.replace(target)
    return target


@functools.cache
def machine() -> ctypes.CDLL:
    """Return the compiled machine of `machine/`."""
    sources, headers = (sorted((HERE / "machine").glob(pattern)) for pattern in ("*.cpp", "*.h"))
    library = ctypes.CDLL(str(compiled("machine.so", ["g++", *FLAGS], sources, headers)))
    library.emulator_operation.restype = library.emulator_run.restype = ctypes.c_int64
    library.emulator_program.restype = ctypes.c_void_p
    return library


def libcuda() -> Path:
    """Return a libcuda.so.1 that passes launches to a callback."""
    command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    return compiled("libcuda.so.1", command, [HERE / "libcuda.c"])
