"""Runs of consecutive numbers in an index, which one slice or one copy can handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Run = tuple[int, int, int]
"""A run: its index in the sequence of numbers, its first number, and the number after its last."""

# A loop is faster than vector operations for up to this many numbers.
SHORT = 128


def find_runs(values: npt.NDArray[Any] | list[int]) -> list[Run]:
    """Return the runs of consecutive rising numbers, in order. Negative numbers are in no run."""
    count = len(values)
    if count > SHORT:
        return _find_long_runs(np.asarray(values))
    numbers: list[int] = values if isinstance(values, list) else values.tolist()
    if not count:
        return []
    first = numbers[0]
    if first >= 0 and (count == 1 or numbers == list(range(first, first + count))):
        return [(0, first, first + count)]
    runs, begin, behind = [], 0, first + 1
    for at in range(1, count):
        number = numbers[at]
        if number != behind or not number:  # 0 does not continue a run after -1
            runs.append((begin, first, behind))
            begin, first, behind = at, number, number
        behind += 1
    runs.append((begin, first, behind))
    return [run for run in runs if run[1] >= 0] if min(numbers) < 0 else runs


def _find_long_runs(values: npt.NDArray[Any]) -> list[Run]:
    edges = values[1:] - values[:-1] != 1
    edges |= values[:-1] < 0
    begins = np.concatenate(([0], edges.nonzero()[0] + 1))
    firsts = values[begins].astype(np.int64)
    ends = firsts + np.diff(begins, append=len(values))
    present = firsts >= 0
    if not present.all():
        begins, firsts, ends = begins[present], firsts[present], ends[present]
    return list(zip(begins.tolist(), firsts.tolist(), ends.tolist(), strict=True))
