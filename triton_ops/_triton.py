"""The one place that imports triton, so that `import pc` works where triton does not exist.

A kernel module begins with `from ._triton import tl, triton`. Without triton both names are stand-ins: `@triton.jit`
leaves the function as it is, and the launchers, which are the only callers, refuse with `require_triton`.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["HAS_TRITON", "INTERPRET", "KERNELS_ON_CPU", "CompiledKernel", "require_triton", "tl", "triton"]

try:
    import triton
    import triton.language as tl
    from triton.compiler import CompiledKernel

    HAS_TRITON = True
except ImportError:  # Windows, macOS, or a torch without triton

    class _Absent:
        """Answers every attribute with itself and every call with its argument, so that kernel modules import."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args else self

    triton = tl = _Absent()
    CompiledKernel = _Absent
    HAS_TRITON = False


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "yes", "on")


INTERPRET = HAS_TRITON and _is_set("TRITON_INTERPRET")
"""Whether kernels run in triton's interpreter. Fixed at import, as `triton.jit` fixes it."""

if INTERPRET and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        _patch_tensor(tensor, scope)
        # The interpreter calls int() on an array of one element, which numpy refuses from 2.5 on.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_for_numpy

KERNELS_ON_CPU = INTERPRET or (HAS_TRITON and _is_set("PC_KERNELS_ON_CPU"))
"""Whether operators on CPU tensors launch kernels: in the interpreter, and with PC_KERNELS_ON_CPU=1 in whatever Triton
driver is active, which then runs compiled kernels on host memory (tests/emulator). Fixed at import."""


def require_triton(op: str) -> None:
    """Raises RuntimeError when `op` needs a kernel and triton is not installed."""
    if not HAS_TRITON:
        raise RuntimeError(f"pc.{op}: tensors on an accelerator need triton; pip install triton")
