"""The repair of objects after `os.fork()`. A child process has none of its parent's other threads."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """An object with a lock or a thread."""

    def _after_fork(self) -> None:
        """Replace, in a child process, locks that another thread may have held, and threads."""


_OBJECTS: WeakSet[Forked] = WeakSet()


def repair_after_fork(forked: Forked) -> None:
    """Call `_after_fork` of an object in later child processes, as long as the object lives."""
    _OBJECTS.add(forked)


def _repair() -> None:
    for forked in list(_OBJECTS):
        forked._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_repair)
