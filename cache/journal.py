"""How to undo the verb that runs.

An interrupt may come between any two instructions. So before a change that nothing else tells of, a verb notes what was
there: fields of a request, a total of the manager among them; what a dictionary or a list contains.
A note is a function and its arguments, which may be called whether the change was made or not, and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a dictionary does not contain.
ABSENT: Any = object()

# What is noted where a verb is not undone: all that is left of it can be derived.
COMPLETES = (lambda: None,)


class Journal(list[tuple[Any, ...]]):
    """The notes of the verb that runs, in the order of its changes; empty when none does.

    `in_policy`: whether a policy is being called at this moment, which may not call the manager.
    """

    __slots__ = ("in_policy",)

    def __init__(self) -> None:
        super().__init__()
        self.in_policy = False

    def fields(self, of: object, *names: str) -> None:
        """Attributes are about to be set."""
        self.append((put_fields, of, names, [getattr(of, name) for name in names]))

    def members(self, of: dict[Any, Any], key: Any) -> None:
        """An entry is about to be set or removed."""
        self.append((_put_member, of, key, of.get(key, ABSENT)))

    def growth(self, of: Any) -> None:
        """Entries are about to be added behind those that there are."""
        self.append((keep_first, of, len(of)))

    def undo(self) -> None:
        """Puts back what was there, the last change first; its notes stay."""
        for function, *args in reversed(self):
            function(*args)


def put_fields(of: object, names: Sequence[str], values: Sequence[Any]) -> None:
    """Sets attributes."""
    for name, value in zip(names, values, strict=True):
        setattr(of, name, value)


def keep_first(of: Any, count: int) -> None:
    """Removes what was added behind the first entries, of a dictionary without comparing keys, which may raise."""
    if not isinstance(of, dict):
        del of[count:]
        return
    while len(of) > count:
        of.popitem()


def _put_member(of: dict[Any, Any], key: Any, value: Any) -> None:
    if value is ABSENT:
        of.pop(key, None)
    else:
        of[key] = value
