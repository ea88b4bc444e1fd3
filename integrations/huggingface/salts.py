"""Whose requests share blocks: a salt that a thread sets for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Salts:
    """The salt of each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def current(self) -> Any:
        """The salt of the thread that asks; None where it has set none."""
        return getattr(self._local, "salt", None)

    @contextmanager
    def within(self, salt: Any) -> Iterator[None]:
        """Sets this thread's salt.

        Raises:
            TypeError: `salt` is neither str, bytes nor int.
        """
        if isinstance(salt, bool) or not isinstance(salt, str | bytes | int):
            raise TypeError(f"salt: got {type(salt).__name__}, needs str, bytes or int")
        before = self.current
        self._local.salt = salt
        try:
            yield
        finally:
            self._local.salt = before
