"""What is known of triton without importing it: whether it is there, and where kernels run."""

from __future__ import annotations

import importlib.util
import os
import pkgutil

__all__ = ["HAS_TRITON", "INTERPRET", "KERNELS_ON_CPU", "is_set", "load_kernels", "require_triton"]


def is_set(name: str) -> bool:
    """Whether an environment variable is switched on."""
    return os.environ.get(name, "0").lower() in ("1", "true", "yes", "on")


HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether triton is installed: not on Windows and macOS, and not with every torch."""

INTERPRET = HAS_TRITON and is_set("TRITON_INTERPRET")
"""Whether kernels run in triton's interpreter. Fixed at import, as `triton.jit` fixes it."""

KERNELS_ON_CPU = INTERPRET or (HAS_TRITON and is_set("PC_KERNELS_ON_CPU"))
"""Whether operators on CPU tensors launch kernels: in the interpreter, and with PC_KERNELS_ON_CPU=1 in whatever Triton
driver is active, which then runs compiled kernels on host memory (tests/emulator). Fixed at import."""


def load_kernels() -> None:
    """Imports every kernel: for the interpreter, which `triton.jit` asks for, and for whoever looks at all of them."""
    kernels = importlib.import_module(f"{__package__}.kernels")
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")


def require_triton(op: str) -> None:
    """RuntimeError where triton is not installed, which `op` is about to launch kernels of."""
    if not HAS_TRITON:
        raise RuntimeError(f"pc.{op}: tensors on an accelerator need triton; pip install triton")
