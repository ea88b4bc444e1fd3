"""Counts of Python calls, for tests of costs that no clock disturbs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def calls_within(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function. Return its result, and the names of the Python functions that it calls, without numpy's own.

    Garbage is collected before and not meanwhile: the objects of earlier tests may run Python code when they are
    collected.
    """
    calls, own = list[str](), getattr(function, "__code__", None)

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is not own and "numpy" not in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return result, calls
