"""The repair of objects after `os.fork()`. A child process has none of its parent's other threads."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

_OBJECTS: WeakSet[Any] = WeakSet()


def repair_after_fork(forked: Any) -> None:
    """Call `_after_fork` of an object in later child processes, as long as the object lives.

    The method must replace threads, and locks that another thread may have held.
    """
    _OBJECTS.add(forked)


def _repair() -> None:
    for forked in list(_OBJECTS):
        forked._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_repair)
