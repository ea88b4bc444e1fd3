"""The one place that imports numpy: operators on a device, and FlashAttention's functions, do without it."""

from __future__ import annotations

__all__ = ["HAS_NUMPY", "np"]


class _Absent:
    def __getattr__(self, name: str) -> object:
        raise ImportError("numpy: this operator on CPU tensors, and debug mode, need it; pip install numpy")


try:
    import numpy as np

    HAS_NUMPY = True
except ImportError:
    np = _Absent()  # type: ignore[assignment]
    HAS_NUMPY = False
