"""What the groups of a manager hold: keys and values of the layers that share a block table, or states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....cache import FullAttention, Group, Recurrent, SlidingWindow
from ..memory import default_num_blocks, memory_budget
from .states import States, StateStorage
from .storage import BlockStorage, Content, Specs

CHUNK = 1024
"""Tokens that are computed, and written to blocks, at a time where layers have windows."""


class GroupedStorage:
    """The storage of each group of a manager.

    Args:
        groups: Specs of the groups.
        parts: What each group holds.
        block_size: Tokens of a block.

    Attributes:
        kv: Groups of keys and values, with their number.
        simple: Whether a hit of any whole blocks will do: there are neither windows nor states.
        chunk: Blocks that are written between two commits, so that a window's are used again; None: all at once.
        states: Of the recurrent group; None without.
        state_group: Its number; None without.
        specs: What each attention layer keeps of a token.
    """

    def __init__(self, groups: Sequence[Group], parts: Sequence[BlockStorage | StateStorage], block_size: int) -> None:
        self.groups = tuple(groups)
        self.parts = tuple(parts)
        self.block_size = block_size
        self.kv = [(group, part) for group, part in enumerate(parts) if isinstance(part, BlockStorage)]
        self.specs: Specs = {layer: specs for _, part in self.kv for layer, specs in part.specs.items()}
        self.simple = len(groups) == 1 and isinstance(groups[0], FullAttention)
        self.state_group = next((g for g, part in enumerate(parts) if isinstance(part, StateStorage)), None)
        self.states = next((part for part in parts if isinstance(part, StateStorage)), None)

        room = [
            part.num_blocks - spec.needed(spec.window, -(-spec.window // block_size), block_size).size
            for spec, part in zip(groups, parts, strict=True)
            if isinstance(spec, SlidingWindow)
        ]
        self.chunk = max(1, min(CHUNK // block_size, min(room) // 2)) if room else None

    def content(self, group: int, block: int) -> Content:
        """Copies of what a block of a group holds, in host memory."""
        return self.parts[group].content(block)


def grouped_storage(
    model: Any,
    num_blocks: int | None,
    window_blocks: int | None,
    block_size: int,
    specs: Specs,
    windows: dict[int, int],
    like: States,
) -> GroupedStorage:
    """Room for a model's keys and values by window, and for states in a quarter of the default memory at most.

    Args:
        model: The model.
        num_blocks: Blocks of keys and values; None: see `default_num_blocks`.
        window_blocks: Blocks of layers with a window; None: as many as of others.
        block_size: Tokens of a block.
        specs: What its attention layers keep of a token.
        windows: Window of each layer that has one.
        like: The states of a row; empty without.
    """
    by_window: dict[int, Specs] = {}
    for layer, pair in specs.items():
        by_window.setdefault(windows.get(layer, 0), {})[layer] = pair
    held = [(window, BlockStorage(0, block_size, own)) for window, own in sorted(by_window.items() or [(0, {})])]
    sizes = [part.bytes_per_block for window, part in held if not (window and window_blocks)]
    taken = sum((window_blocks or 0) * part.bytes_per_block for window, part in held if window)
    num_blocks = num_blocks or default_num_blocks(model, sum(sizes), block_size, taken)
    groups: list[Group] = []
    parts: list[BlockStorage | StateStorage] = []
    for window, part in held:
        part.num_blocks = (window_blocks or num_blocks) if window else num_blocks
        own = part.num_blocks
        groups.append(SlidingWindow(window=window, num_blocks=own) if window else FullAttention(num_blocks=own))
        parts.append(part)
    if like:
        states = StateStorage(0, like)
        fitting = memory_budget(model) // 4 // max(states.bytes_per_block, 1)
        states.num_blocks = max(1, min(num_blocks, fitting))
        groups.append(Recurrent(num_blocks=states.num_blocks))
        parts.append(states)
    return GroupedStorage(groups, parts, block_size)
