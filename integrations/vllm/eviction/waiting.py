"""The blocks that waiting requests will hit, which need no prediction by a policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from ..api import block_hash

MOST = 64
"""Number of waiting requests that are read, from the front of the queue."""


class WaitingPrefixes:
    """Block hashes of the requests that are next to run.

    Several requests may have the same hash. Only the last of them is stored, because it usually leaves the queue last.
    Counting all requests of each hash would take as long as vLLM's own part of a step.
    """

    def __init__(self, waiting: Callable[[], Iterable[Any]]) -> None:
        self._waiting = waiting
        self._known: dict[str, int] = {}
        self._serials: dict[bytes, int] = {}
        self._present: set[int] = set()
        self._num_hashes = 0
        self.joined = 0
        """The number of requests that were added."""
        self.is_stale = True
        """Whether the queue must be read again. Set before each step, because within a step the queue only shrinks."""

    @property
    def left(self) -> int:
        """The number of requests that were added and have left the queue."""
        return self.joined - len(self._present)

    def refresh(self) -> None:
        """Read the scheduler's queue if `is_stale` is set."""
        if not self.is_stale:
            return
        self.is_stale = False
        found = {request.request_id: request for request in itertools.islice(self._waiting(), MOST)}
        for name in self._known.keys() - found.keys():
            self._present.discard(self._known.pop(name))
        for name, request in found.items():
            if name not in self._known:
                self.joined += 1
                self._known[name] = self.joined
                self._present.add(self.joined)
                if not request.skip_reading_prefix_cache:
                    self._serials.update(dict.fromkeys(request.block_hashes, self.joined))
        if len(self._serials) > 2 * self._num_hashes + 1024:
            present = self._present
            self._serials = {each: serial for each, serial in self._serials.items() if serial in present}
            self._num_hashes = len(self._serials)

    def split(self, numbers: list[int], blocks: list[Any]) -> tuple[list[int], list[int]]:
        """Split block numbers into those that no waiting request will hit, and the others."""
        if not self._present:
            return numbers, []
        free: list[int] = []
        awaited: list[int] = []
        serials, present = self._serials, self._present
        for number in numbers:
            key = block_hash(blocks[number])  # its last 4 bytes are the group of layers
            (free if key is None or serials.get(key[:-4]) not in present else awaited).append(number)
        return free, awaited
