"""The blocks of one model's prompts: their manager, and its requests, which end whatever becomes of a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeAlias

from ...cache import CacheManager

AnyManager: TypeAlias = CacheManager[Any, Any, Any]  # of one group or of several


class Lease:
    """The requests of one call. If the call is cut off, the next call ends those that are left."""

    def __init__(
        self, manager: AnyManager, returns: float | None = None, unchanged: Callable[[], bool] = lambda: True
    ) -> None:
        self.manager = manager
        self.request_ids: list[str] = []
        self.stale = False  # whether the model was found changed: the call publishes nothing any more
        self._returns, self._unchanged = returns, unchanged

    def publishes(self) -> bool:
        """Return whether the model is what the call began with; once it is not, never again. Ask before each pass."""
        self.stale = self.stale or not self._unchanged()
        return not self.stale

    def take(self, request_id: str) -> None:
        """Record a request before it is started."""
        self.request_ids.append(request_id)

    def free(self, request_id: str) -> None:
        """End a request, if it was started."""
        free(self.manager, request_id)
        self.request_ids.remove(request_id)

    def close(self) -> None:
        """End all requests."""
        while self.request_ids:
            free(self.manager, self.request_ids[-1], self._returns)
            self.request_ids.pop()


def free(manager: AnyManager, request_id: Hashable, returns: float | None = None) -> None:
    """End a request, if it was started."""
    with suppress(KeyError):
        manager.free(request_id, returns)


class Leases:
    """A manager and the requests of its calls."""

    def __init__(self, manager: AnyManager) -> None:
        self.manager = manager
        self.block_size = manager.block_size
        # Looked through by the next call: a finalizer would be Python code in which an interrupt is swallowed.
        self._leases: dict[weakref.ref[Lease], list[str]] = {}

    def lease(self, returns: float | None = None, unchanged: Callable[[], bool] = lambda: True) -> Lease:
        """Return a lease for the requests of a call; `returns`: see `CacheManager.free`.

        `unchanged` tells whether the model is still what the call began with.
        """
        self.sweep()
        lease = Lease(self.manager, returns, unchanged)
        self._leases[weakref.ref(lease)] = lease.request_ids
        return lease

    def sweep(self) -> None:
        """End the requests of calls that were cut off."""
        for owner, request_ids in list(self._leases.items()):
            if owner() is None:
                for request_id in request_ids:
                    free(self.manager, request_id)
                self._leases.pop(owner, None)  # another thread may have ended them too
