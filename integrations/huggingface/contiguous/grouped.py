"""What the groups of a manager hold: keys and values of the layers that share a block table, or states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....cache import FullAttention, Group, Recurrent
from ..memory import default_num_blocks, memory_budget
from .states import States, StateStorage
from .storage import BlockStorage, Content, Specs


class GroupedStorage:
    """The storage of each group of a manager.

    Args:
        groups: Specs of the groups.
        parts: What each group holds.
        block_size: Tokens of a block.

    Attributes:
        kv: Groups of keys and values, with their number.
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
        self.state_group = next((g for g, part in enumerate(parts) if isinstance(part, StateStorage)), None)
        self.states = next((part for part in parts if isinstance(part, StateStorage)), None)

    def content(self, group: int, block: int) -> Content:
        """Copies of what a block of a group holds, in host memory."""
        return self.parts[group].content(block)


def grouped_storage(model: Any, num_blocks: int | None, block_size: int, specs: Specs, like: States) -> GroupedStorage:
    """Room for a model's keys and values, and for states in a quarter of the default memory at most.

    Args:
        model: The model.
        num_blocks: Blocks of keys and values; None: see `default_num_blocks`.
        block_size: Tokens of a block.
        specs: What its attention layers keep of a token.
        like: The states of a row; empty without.
    """
    blocks = BlockStorage(0, block_size, specs)
    blocks.num_blocks = num_blocks or default_num_blocks(model, blocks.bytes_per_block, block_size)
    groups: list[Group] = [FullAttention(num_blocks=blocks.num_blocks)]
    parts: list[BlockStorage | StateStorage] = [blocks]
    if like:
        states = StateStorage(0, like)
        fitting = memory_budget(model) // 4 // max(states.bytes_per_block, 1)
        states.num_blocks = max(1, min(blocks.num_blocks, fitting))
        groups.append(Recurrent(num_blocks=states.num_blocks))
        parts.append(states)
    return GroupedStorage(groups, parts, block_size)
