"""Slots as runs of consecutive ones, each of which a plain copy moves at once."""

from __future__ import annotations

from collections.abc import Iterable

Run = tuple[int, int, int]
"""Where it begins in the order of the tokens, its first slot, and the slot behind its last."""


def block_runs(blocks: list[int], block_size: int, begin: int, count: int) -> list[Run]:
    """Slots of `count` tokens, at least one, as runs in their order.

    Args:
        blocks: The blocks that hold them and no others; negative ones are absent and give no runs.
        block_size: Tokens a block.
        begin: Where the tokens begin in the first block.
        count: How many.
    """
    first, number = blocks[0], len(blocks)
    if first >= 0 and (number == 1 or blocks == list(range(first, first + number))):
        slot = first * block_size + begin
        return [(0, slot, slot + count)]
    runs = []
    start = 0
    for i in range(1, number + 1):
        if i < number and blocks[i] == blocks[i - 1] + 1 and blocks[start] >= 0:
            continue
        if blocks[start] >= 0:
            token = max(start * block_size - begin, 0)
            slot = blocks[start] * block_size + (begin if not start else 0)
            runs.append((token, slot, slot + min(i * block_size - begin, count) - token))
        start = i
    return runs


def ascending(runs: Iterable[Run]) -> list[tuple[int, int]]:
    """The same slots in ascending order, touching runs as one: blocks are often handed out in descending order."""
    spans: list[tuple[int, int]] = []
    for first, end in sorted([(first, end) for _, first, end in runs]):
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((first, end))
    return spans
