"""Operators: one file per op, each with its reference, kernel, launcher, operator and public function."""

from __future__ import annotations

if __name__ != "pc.triton_ops":
    raise ImportError(f"import pc.triton_ops, not {__name__}: a second copy would register every operator twice")

from ._debug import set_debug_mode
from .paged_attention import paged_attention
from .reshape_and_cache import reshape_and_cache

__all__ = ["paged_attention", "reshape_and_cache", "set_debug_mode"]
