"""Fresh memory for results."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence

import torch

_HUGE_FROM = 4 << 20
_PAGE = 4096
_MADV_HUGEPAGE = 14


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = function
    return found


_madvise = _find_madvise()


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Asks the kernel for huge pages under a large, fresh CPU tensor; advice that it may decline.

    Faulting in 64 MB page by page takes several times as long as copying 64 MB into it.
    """
    size = tensor.untyped_storage().nbytes()
    if _madvise is None or size < _HUGE_FROM:
        return
    begin = -(-tensor.untyped_storage().data_ptr() // _PAGE) * _PAGE
    _madvise(begin, (size - _PAGE) // _PAGE * _PAGE, _MADV_HUGEPAGE)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty`, on huge pages where it is large and on the CPU."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.numel() * dtype.itemsize >= _HUGE_FROM:
        advise_huge_pages(tensor)
    return tensor
