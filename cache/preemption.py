"""Requests that gave up their blocks for a while, and the host memory their KV waits in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


class HostSlots:
    """Block-sized slots of host memory, by number; the memory itself is the engine's.

    Args:
        count: Slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots not in use."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Up to `count` slots: fewer when fewer are free."""
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def give_back(self, slots: list[int]) -> None:
        """Makes slots free."""
        self._free += slots

    def check(self, held: list[int]) -> None:
        """Asserts that every slot is free or held, once."""
        assert sorted([*self._free, *held]) == list(range(self.count)), "a host slot is lost or in two places"


@dataclass
class Preempted:
    """What is left of a preempted request."""

    tokens: array[int]
    keys: Any
    committed: int
    """Positions before it had been written."""
    priority: int = 0
    slots: list[int] = field(default_factory=list)
    """Host slots of its leading blocks."""
