"""What a caller knows of a conversation's future: a probability that a thread sets for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Hints:
    """How probably the conversations of each thread go on."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def returns(self) -> float | None:
        """What the thread that asks has set; None: unknown."""
        known: float | None = getattr(self._local, "returns", None)
        return known

    @contextmanager
    def within(self, returns: float | None) -> Iterator[None]:
        """Sets it for this thread.

        Raises:
            TypeError: `returns` is neither a number nor None.
            ValueError: It is not between 0 and 1.
        """
        if returns is not None:
            if isinstance(returns, bool) or not isinstance(returns, int | float):
                raise TypeError(f"returns: got {type(returns).__name__}, needs a number or None")
            if not 0 <= returns <= 1:
                raise ValueError(f"returns: got {returns}, needs 0 to 1")
        before = self.returns
        self._local.returns = returns
        try:
            yield
        finally:
            self._local.returns = before
