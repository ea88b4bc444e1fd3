"""Those who are notified that blocks are published in the prefix cache, or leave it."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from .keys import FrozenKeys

log = logging.getLogger("pc.cache")


class Listener(Protocol):
    """Is notified of every block that is published in the prefix cache or leaves it, in order.

    Called at the end of the verb that caused it, under the manager's lock, when the manager's state is whole. It may
    call the manager; what that causes is notified after this. It must not wait for another thread that does. What it
    raises is logged (logger "pc.cache"), and the verb returns as if it had not. A `KeyboardInterrupt` in the middle of
    a notification goes to the caller of the verb; the notification is then repeated, to all listeners, after the next
    verb: each comes at least once.
    """

    def stored(
        self, group: int, hashes: list[bytes], parent: bytes | None, token_ids: list[int], extra_keys: FrozenKeys
    ) -> None:
        """A run of blocks of one sequence was published; `parent` is the hash of the block before, if any.

        `extra_keys` are as given to `allocate`, lists as tuples.
        """

    def removed(self, group: int, hashes: list[bytes]) -> None:
        """Blocks are no longer published."""

    def cleared(self) -> None:
        """The manager was reset."""


class Listeners:
    """The listeners that callers append to `registered`, and a queue of events for them.

    While listeners are being notified (`busy`), the verbs that they call leave their events in the queue.
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
        self.busy = True  # an interrupt leaves it so: `ManagerState.undo` puts it right
        while self.queue:
            event, args = self.queue[0]
            for listener in tuple(self.registered):
                try:
                    getattr(listener, event)(*args)
                except Exception:  # noqa: PERF203
                    log.exception("%s.%s raised; the manager goes on", type(listener).__name__, event)
            del self.queue[0]
        self.busy = False
