"""What is kept of requests that gave up their blocks for a while, and the host memory their KV waits in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from .table import Ids


class HostSlots:
    """Block-sized slots of host memory for one group, by number; the memory itself is the engine's.

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
        """`count` slots; the caller has made sure that so many are free."""
        return [self._free.pop() for _ in range(count)]

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
    priority: int = 0
    position: int = 0
    """Computing can go on here with what is in host memory alone, or one token before if it is the end."""
    blocks: list[Ids] = field(default_factory=list)
    """Per group, the logical blocks in host memory."""
    slots: list[list[int]] = field(default_factory=list)
    """Per group, the host slot of each."""
