"""Checks of arguments of `CacheManager.allocate`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..triton_ops._core.checks import check_integer
from .runs import Span


def check_segments(segments: Any, reuse: str) -> list[Span]:
    """Check segments and return them as pairs of integers."""
    if reuse != "anywhere":
        raise ValueError(f"segments: got some with reuse={reuse!r}, needs reuse='anywhere'")
    try:
        spans = [(check_integer("segments", a), check_integer("segments", b)) for a, b in segments]
    except (TypeError, ValueError):
        raise TypeError(f"segments: got {segments!r}, needs pairs (start, end) of integers") from None
    edges = [0, *[edge for span in spans for edge in span]]
    if edges != sorted(edges):
        raise ValueError(f"segments: got {segments!r}, needs ascending spans that do not overlap")
    return spans


def check_hint(priority: Any, ttl: Any) -> int:
    """Check a priority and a ttl, and return the priority as an int."""
    if ttl is not None and not isinstance(ttl, int | float | np.number):
        raise TypeError(f"ttl: got {type(ttl).__name__}, needs seconds or None")
    if ttl is not None and not ttl >= 0:
        raise ValueError(f"ttl: got {ttl}, needs at least 0 seconds")
    return check_integer("priority", priority, -(1 << 31), 31)
