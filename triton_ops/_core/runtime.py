"""Facts about triton that need no import of it: whether it is installed, and where kernels run."""

from __future__ import annotations

import importlib.util
import os
import pkgutil


def is_set(name: str) -> bool:
    """Return whether an environment variable is set to a true value."""
    return os.environ.get(name, "0").lower() in ("1", "true", "yes", "on")


HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether triton is installed. It is not on Windows and macOS, and not with every torch."""

INTERPRET = HAS_TRITON and is_set("TRITON_INTERPRET")
"""Whether kernels run in triton's interpreter. Fixed at import, as `triton.jit` fixes it."""

KERNELS_ON_CPU = INTERPRET or (HAS_TRITON and is_set("PC_KERNELS_ON_CPU"))
"""Whether operators on CPU tensors launch kernels. They do in the interpreter. They also do with PC_KERNELS_ON_CPU=1,
where the active Triton driver must run compiled kernels on host memory (tests/emulator). Fixed at import."""


def load_kernels() -> None:
    """Import all kernels. `triton.jit` reads TRITON_INTERPRET when a kernel's module is imported."""
    kernels = importlib.import_module("..kernels", __package__)
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")


def require_triton(op: str) -> None:
    """Check that triton is installed, before an operator launches a kernel.

    Raises:
        RuntimeError: Triton is not installed.
    """
    if not HAS_TRITON:
        raise RuntimeError(f"pc.{op}: tensors on an accelerator need triton; pip install triton")
