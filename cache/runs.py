"""Slots of blocks, one by one and as runs of consecutive slots, which one slice or one copy can handle."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..triton_ops._copy.runs import SHORT
from ..triton_ops._copy.runs import Run as Run
from ..triton_ops._copy.runs import find_runs as find_runs

Slots = npt.NDArray[np.int64]
"""Slots of tokens; -1 for a token without a slot."""

Span = tuple[int, int]
"""A range [start, end)."""


class MovedSpan(NamedTuple):
    """Tokens of a prompt that are cached at another position or after other text; see `Allocation.moved`.

    Attributes:
        start: Position of the first token in this prompt.
        end: Position after the last token.
        slots: Slots of the cached KV, [end - start] int64. They need not start at a block boundary.
        delta: Number of positions by which the keys must be rotated: this prompt's position minus the cached one.
        targets: Slots of this request to copy the KV to, [end - start] int64.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
        >>> text = list(range(100, 112))
        >>> for request in ("a", "b"):
        ...     allocation = manager.allocate(request, [*range(7 if request == "b" else 4), *text, 1], reuse="anywhere")
        ...     merged = manager.commit(request, 17)
        >>> span = allocation.moved[0]
        >>> span.start, span.end, span.delta, span.slots[:4].tolist()
        (7, 19, 3, [4, 5, 6, 7])
    """

    start: int
    end: int
    slots: Slots
    delta: int
    targets: Slots


def slot_runs(blocks: npt.NDArray[Any] | list[int], block_size: int, begin: int, count: int) -> list[Run]:
    """Return the slots of `count` tokens, at least one, as runs in order.

    The tokens start at offset `begin` of the first block. `blocks` are exactly the blocks that hold them. A
    negative number marks an absent block, which gives no run.
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
