"""The manager of a model's blocks, and the requests of each call, which end even if the call is interrupted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, TypeAlias

from ....cache import CacheManager

AnyManager: TypeAlias = CacheManager[Any, Any, Any]  # of one group or of several


class Lease:
    """The requests of one call. If the call is interrupted, the next call ends the requests that remain."""

    def __init__(
        self, manager: AnyManager, returns: float | None = None, unchanged: Callable[[], bool] = lambda: True
    ) -> None:
        self.manager = manager
        self.request_ids: list[str] = []
        self.stale = False  # the model has changed, so the call must publish nothing more
        self._returns, self._unchanged = returns, unchanged

    def publishes(self) -> bool:
        """Return whether the model is unchanged since the call started, so that the call may publish blocks.

        Once False, it stays False. Callers must ask before each forward pass.
        """
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
        # The next call checks them. A finalizer could be interrupted, and Python ignores exceptions in finalizers.
        self._leases: dict[weakref.ref[Lease], list[str]] = {}

    def lease(self, returns: float | None = None, unchanged: Callable[[], bool] = lambda: True) -> Lease:
        """Return a lease for the requests of a call.

        Args:
            returns: See `CacheManager.free`.
            unchanged: Returns whether the model is unchanged since the call started.
        """
        self.sweep()
        lease = Lease(self.manager, returns, unchanged)
        self._leases[weakref.ref(lease)] = lease.request_ids
        return lease

    def sweep(self) -> None:
        """End the requests of calls that were interrupted."""
        for owner, request_ids in list(self._leases.items()):
            if owner() is None:
                for request_id in request_ids:
                    free(self.manager, request_id)
                self._leases.pop(owner, None)  # another thread may have removed it too
