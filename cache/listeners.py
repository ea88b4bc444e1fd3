"""Listeners, which are notified of blocks that are published in the prefix cache or removed from it."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from .keys import FrozenKeys

log = logging.getLogger("pc.cache")


class Listener(Protocol):
    """An object that is notified, in order, of every block that is published in the prefix cache or removed from it.

    A notification comes at the end of the verb that caused it, under the manager's lock, when the manager's state is
    consistent. The listener may call the manager; it is notified of the consequences after this. It must not wait for
    another thread that calls the manager.

    An exception of the listener is logged (logger "pc.cache"), and the verb returns normally. A `KeyboardInterrupt`
    during a notification goes to the caller of the verb. The notification is then repeated to all listeners after the
    next verb, so each notification comes at least once.
    """

    def stored(
        self, group: int, hashes: list[bytes], parent: bytes | None, token_ids: list[int], extra_keys: FrozenKeys
    ) -> None:
        """Blocks of one sequence were published. `parent` is the hash of the block before them, or None.

        `extra_keys` are the keys given to `allocate`, with lists as tuples.
        """

    def removed(self, group: int, hashes: list[bytes]) -> None:
        """Blocks are no longer published."""

    def cleared(self) -> None:
        """The manager was reset."""


class Listeners:
    """The listeners that callers append to `registered`, and a queue of events for them.

    While listeners are being notified (`busy`), verbs that they call add their events to the queue.
    """

    def __init__(self) -> None:
        self.registered: list[Listener] = []
        self.queue: list[tuple[str, tuple[Any, ...]]] = []
        self.busy = False

    def add(self, event: str, *args: Any) -> None:
        """Queue an event of a verb that is complete."""
        if self.registered:
            self.queue.append((event, args))

    def notify(self) -> None:
        """Notify all listeners of all queued events, in order."""
        self.busy = True  # stays True after an interrupt, until `ManagerState.undo`
        while self.queue:
            event, args = self.queue[0]
            for listener in tuple(self.registered):
                try:
                    getattr(listener, event)(*args)
                except Exception:  # noqa: PERF203
                    log.exception("%s.%s raised; the manager continues", type(listener).__name__, event)
            del self.queue[0]
        self.busy = False
