"""What one model's prompts are kept in: a manager, the blocks it hands out, and states where the model has some."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any, TypeAlias

from ...cache import CacheManager

AnyManager: TypeAlias = CacheManager[Any, Any, Any]
"""Of one group or of several."""


class Lease:
    """The requests of one call; those it has not given back when it is lost are given back by the next call."""

    def __init__(self, manager: AnyManager, lost: deque[list[str]], returns: float | None = None) -> None:
        self._manager = manager
        self._returns = returns
        self._request_ids: list[str] = []
        self._finalizer = weakref.finalize(self, lost.append, self._request_ids)
        self._finalizer.atexit = False

    def take(self, request_id: str) -> None:
        """Remembers a request before it is started."""
        self._request_ids.append(request_id)

    def free(self, request_id: str) -> None:
        """Ends a request, if it was started."""
        free(self._manager, request_id)
        self._request_ids.remove(request_id)

    def close(self) -> None:
        """Ends all requests."""
        while self._request_ids:
            free(self._manager, self._request_ids[-1], self._returns)
            self._request_ids.pop()


def free(manager: AnyManager, request_id: Hashable, returns: float | None = None) -> None:
    """Ends a request; one that was never started is none."""
    try:
        manager.free(request_id, returns)
    except KeyError:
        return


class Store:
    """A manager and what its blocks hold.

    Args:
        manager: Hands out the blocks.
        storage: Keys and values of every layer, by block.
        states: Of recurrent and convolution layers, by block; None for a model without.
        host: Blocks in host memory; None without.
        reuse: "prefix", or "gap" to reuse cached blocks behind missing ones too.
        empty_cache: What a call's cache is made like.
        vision: Outputs of a vision tower; None for a model without.
        heeds_padding: Whether a token's KV depends on how many masked columns are before it.
        kept: Caches that calls have ended with.
    """

    def __init__(
        self,
        manager: AnyManager,
        storage: Any,
        states: Any = None,
        heeds_padding: bool = False,
        host: Any = None,
        reuse: str = "prefix",
        vision: Any = None,
        empty_cache: Any = None,
        kept: Any = None,
    ) -> None:
        self.manager = manager
        self.storage = storage
        self.states = states
        self.host = host
        self.reuse = reuse
        self.vision = vision
        self.empty_cache = empty_cache
        self.kept = kept
        self.hidden: Any = None
        self.heeds_padding = heeds_padding
        self.block_size = manager.block_size
        self._lost: deque[list[str]] = deque()

    def lease(self, returns: float | None = None) -> Lease:
        """Room for the requests of a call; `returns`: see `CacheManager.free`."""
        self.sweep()
        return Lease(self.manager, self._lost, returns)

    def sweep(self) -> None:
        """Ends the requests of calls that were cut off before they could do so."""
        while self._lost:
            for request_id in self._lost.popleft():
                free(self.manager, request_id)
