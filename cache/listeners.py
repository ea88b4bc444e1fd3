"""Listeners, which are notified of blocks that are published in the prefix cache or removed from it."""

from __future__ import annotations

from typing import Protocol

from .keys import FrozenKeys


class Listener(Protocol):
    """An object that is notified, in order, of every block that is published in the prefix cache or removed from it.

    A notification comes at the end of the manager's method that caused it, under the manager's lock, when the manager's
    state is consistent. The listener may call the manager. Events of that call are notified after this one. The
    listener must not wait for another thread that calls the manager.

    An exception of the listener is logged (logger "pc.cache"), and the method returns normally. A `KeyboardInterrupt`
    during a notification goes to the caller of the method. The notification is then repeated to all listeners after the
    next method, so each notification comes at least once.
    """

    def stored(
        self, group: int, hashes: list[bytes], parent: bytes | None, token_ids: list[int], extra_keys: FrozenKeys
    ) -> None:
        """Handle blocks of one sequence that were published. `parent` is the hash of the block before them, or None.

        `extra_keys` are the keys given to `allocate`, with lists as tuples.
        """

    def removed(self, group: int, hashes: list[bytes]) -> None:
        """Handle blocks that are no longer published."""

    def cleared(self) -> None:
        """Handle a reset of the manager: no block is published any more."""
