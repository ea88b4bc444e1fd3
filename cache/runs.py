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
    token, slot = -begin, first * block_size
    behind = slot + block_size
    for block in blocks[1:]:
        first = block * block_size
        if first == behind and first:  # 0 behind an absent block is no neighbour
            behind += block_size
            continue
        runs.append((token, slot, behind))
        token += behind - slot
        slot, behind = first, first + block_size
    runs.append((token, slot, behind))
    runs[0] = (0, runs[0][1] + begin, runs[0][2])
    token, slot, behind = runs[-1]
    runs[-1] = (token, slot, slot + count - token)
    return [run for run in runs if run[2] > 0] if min(blocks) < 0 else runs


def ascending(runs: Iterable[Run]) -> list[tuple[int, int]]:
    """The same slots in ascending order, touching runs as one: blocks are often handed out in descending order."""
    spans: list[tuple[int, int]] = []
    last = -1
    for first, end in sorted([(first, end) for _, first, end in runs]):
        if first == last:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((first, end))
        last = end
    return spans
