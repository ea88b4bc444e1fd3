"""Whoever hears that blocks become findable or cease to be."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Protocol

from .keys import FrozenKeys

log = logging.getLogger("pc.cache")


class Listener(Protocol):
    """Hears of every block that becomes findable or ceases to be, in order.

    Called at the end of the verb that caused it, under the manager's lock, when the manager's state is whole. It may
    call the manager; what that causes is told after this. It must not wait for another thread that does. What it
    raises is logged (logger "pc.cache"), and the verb returns as if it had not.
    """

    def stored(
        self, group: int, hashes: list[bytes], parent: bytes | None, token_ids: list[int], extra_keys: FrozenKeys
    ) -> None:
        """A run of blocks of one sequence became findable; `parent` is the hash of the block before, if any.

        `extra_keys` are as given to `allocate`, lists as tuples.
        """

    def removed(self, group: int, hashes: list[bytes]) -> None:
        """Blocks are not findable any more."""

    def cleared(self) -> None:
        """The manager was reset."""


class Listeners:
    """Tells listeners what happened once the manager is done with it.

    Attributes:
        heard: See `Listener`; callers append to it.
        queue: What is still to be told.
    """

    def __init__(self) -> None:
        self.heard: list[Listener] = []
        self.queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._telling = False

    def add(self, event: str, *args: Any) -> None:
        """Something happened."""
        if self.heard:
            self.queue.append((event, args))

    def tell(self) -> None:
        """Tells all that is queued, in order; a listener's own calls find it busy and leave theirs to it."""
        if self._telling:
            return
        self._telling = True
        try:
            while self.queue:
                event, args = self.queue.popleft()
                for listener in tuple(self.heard):
                    self._tell(listener, event, args)
        finally:
            self._telling = False

    @staticmethod
    def _tell(listener: Listener, event: str, args: tuple[Any, ...]) -> None:
        try:
            getattr(listener, event)(*args)
        except Exception:
            log.exception("%s.%s raised; the manager goes on", type(listener).__name__, event)
