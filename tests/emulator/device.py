"""The package on the emulator: import this before `pc`, and operators on CPU tensors run their compiled kernels.

It is also a pytest plugin for the package's own tests: `pytest -p emulator.device tests/triton_ops`. EMULATOR_ARCH is
the device: "sm_80" (the default), "sm_86", "sm_89" or "sm_90".
"""

from __future__ import annotations

import dataclasses
import os
import sys

from .build import folder


@dataclasses.dataclass(frozen=True)
class Device:
    """The device that kernels are compiled for: a program's shared memory in bytes, and its processors."""

    shared: int
    processors: int


DEVICES = {
    "sm_80": Device(166_912, 108),
    "sm_86": Device(101_376, 84),
    "sm_89": Device(101_376, 58),
    "sm_90": Device(232_448, 132),
}
ARCH = os.environ.get("EMULATOR_ARCH", "sm_80")


def _start() -> None:
    if ARCH not in DEVICES:
        raise ValueError(f"EMULATOR_ARCH: got {ARCH!r}, needs one of {', '.join(DEVICES)}")
    if "pc" in sys.modules:
        raise ImportError("import emulator.device before pc: the package decides at import where its kernels run")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["PC_KERNELS_ON_CPU"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as on a GPU, and no warning
    # Never use the real cache, since the files kept here have no cubin.
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder() / "triton"))

    from .driver import install

    install(int(ARCH.removeprefix("sm_")), DEVICES[ARCH].shared, DEVICES[ARCH].processors)


_start()
