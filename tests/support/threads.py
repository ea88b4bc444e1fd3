"""Calls that run at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(work: Callable[[Any], Any], *arguments: Any) -> list[Any]:
    """Call a function with each argument in a thread of its own, and return the results."""
    with ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(work, arguments))
