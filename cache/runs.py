"""Slots of blocks, and runs of consecutive numbers, which one slice or one copy can handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
"""Slots of tokens; -1 for a token without a slot."""

Span = tuple[int, int]
"""A range [start, end)."""

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


def slot_runs(blocks: npt.NDArray[Any] | list[int], block_size: int, begin: int, count: int) -> list[Run]:
    """Return the slots of `count` tokens, at least one, as runs in order.

    The tokens start at offset `begin` of the first block. `blocks` are exactly the blocks that hold them. Negative
    blocks are absent and give no runs.
    """
    runs = [(at * block_size - begin, a * block_size, b * block_size) for at, a, b in find_runs(blocks)]
    if runs:
        token, slot, behind = runs[0]
        if token < 0:
            runs[0] = (0, slot - token, behind)
        token, slot, behind = runs[-1]
        runs[-1] = (token, slot, min(behind, slot + count - token))
    return runs


def slots_of_runs(runs: list[Run], count: int) -> Slots:
    """Return the slots of `count` tokens; -1 for tokens in no run."""
    if len(runs) == 1 and runs[0][2] - runs[0][1] == count:
        return np.arange(runs[0][1], runs[0][2])
    slots = np.full(count, -1, np.int64)
    if len(runs) <= SHORT:
        for begin, first, end in runs:
            slots[begin : begin + end - first] = np.arange(first, end)
        return slots
    begins, firsts, ends = np.array(runs, np.int64).T
    lengths = ends - firsts
    places = np.arange(int(lengths.sum())) + np.repeat(begins - lengths.cumsum() + lengths, lengths)
    slots[places] = places + np.repeat(firsts - begins, lengths)
    return slots


def pad_tables(tables: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """Stack block tables and pad them with -1: [len(tables), length of the longest, at least 1]."""
    padded = np.full((len(tables), max([1, *map(len, tables)])), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
