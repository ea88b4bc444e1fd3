"""What the sessions of one model share: the manager, what its blocks hold, and counts."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....cache import CacheManager
from ....cache.allocation import CacheStats

if TYPE_CHECKING:
    from .blocks import ScheduledBlocks
    from .step import GroupedStorage


class SharedBlocks:
    """What the sessions of one model share.

    Args:
        manager: Hands out blocks.
        storage: What they hold.

    Attributes:
        unserved: Requests, tokens and hits of searches that were given up again, and are not to be counted twice.
    """

    def __init__(self, manager: CacheManager[Any, Any, Any], storage: GroupedStorage) -> None:
        self.manager, self.storage = manager, storage
        self.unserved = [0, 0, 0]
        self._lock = threading.Lock()
        self._sessions: list[weakref.ref[ScheduledBlocks]] = []
        self._numbers = itertools.count()

    def join(self, session: ScheduledBlocks) -> int:
        """The number of a new session."""
        with self._lock:
            self._sessions = [other for other in self._sessions if other() is not None]
            self._sessions.append(weakref.ref(session))
            return next(self._numbers)

    def give_up(self, prompt: int, hits: int) -> None:
        """Leaves a search out of the counts."""
        with self._lock:
            for index, count in enumerate((1, prompt, hits)):
                self.unserved[index] += count

    def first_holder(self) -> int:
        """The lowest number of a session with requests."""
        with self._lock:
            sessions = [session for session in (other() for other in self._sessions) if session is not None]
        return min((session.number for session in sessions if session.holds), default=-1)

    def stats(self) -> CacheStats:
        """The manager's counts without searches that were given up."""
        counts = self.manager.stats()
        requests, tokens, hits = self.unserved
        by_cause = counts.hit_tokens_by_cause | {"prefix": counts.hit_tokens_by_cause["prefix"] - hits}
        return replace(
            counts,
            total_requests=counts.total_requests - requests,
            queried_tokens=counts.queried_tokens - tokens,
            hit_tokens=counts.hit_tokens - hits,
            hit_tokens_by_cause=by_cause,
        )
