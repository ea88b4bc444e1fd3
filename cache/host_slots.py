"""The host memory that swapped-out blocks wait in."""

from __future__ import annotations


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
