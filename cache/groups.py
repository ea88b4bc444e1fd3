"""What a group of layers needs resident: one chain of hashes serves them all, each group has its own block table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Group:
    """Layers that share a block table.

    Args:
        num_blocks: Blocks of this group's own pool; None: the manager's num_blocks.
    """

    num_blocks: int | None = field(default=None, kw_only=True)

    @property
    def aligned(self) -> bool:
        """Whether computing can only go on at a block boundary."""
        return False

    def sink_blocks(self, block_size: int) -> int:
        """Blocks at the start of the sequence that stay needed for ever."""
        return 0

    def first_needed(self, position: Any, block_size: int) -> Any:
        """The first block, sinks apart, that a query at `position` or later may read; of each where it is an array."""
        return 0

    def needed(self, position: int, end: int, block_size: int) -> npt.NDArray[np.int32]:
        """The blocks before block `end` that queries at `position` and later read, ascending."""
        first = min(self.first_needed(position, block_size), end)
        sinks = min(self.sink_blocks(block_size), first)
        return np.concatenate((np.arange(sinks, dtype=np.int32), np.arange(first, end, dtype=np.int32)))

    def servable(
        self, resident: npt.NDArray[np.bool_], num_tokens: int, block_size: int, room: int | None = None
    ) -> npt.NDArray[np.bool_]:
        """For every length L of a hit in blocks, 0 to `len(resident)`: whether computing could go on behind it.

        Args:
            resident: Which complete blocks of the sequence are there.
            num_tokens: Length of the sequence, whose last token is always computed.
            block_size: Tokens a block.
            room: Blocks that may be needed at most; None: any number.
        """
        missing = np.concatenate(([0], np.cumsum(~resident)))
        lengths = np.arange(resident.size + 1)
        positions = np.minimum(lengths * block_size, max(num_tokens - 1, 0))
        first = np.minimum(self.first_needed(positions, block_size), lengths)
        sinks = np.minimum(self.sink_blocks(block_size), first)
        fits: npt.NDArray[np.bool_] = (missing[lengths] == missing[first]) & (missing[sinks] == 0)
        if self.aligned:
            fits &= lengths * block_size <= max(num_tokens - 1, 0)
        if room is not None:
            fits &= sinks + lengths - first <= room
        return fits


@dataclass(frozen=True)
class FullAttention(Group):
    """Every earlier token may be read: a hit needs all its blocks."""


@dataclass(frozen=True)
class Tensors(Group):
    """Per-token tensors (hidden states) that are wanted whole: a hit needs all its blocks."""


@dataclass(frozen=True)
class SlidingWindow(Group):
    """A query at p reads t > p - window and t < num_sink_tokens; blocks behind the window are released.

    Args:
        window: Tokens, the query's own included.
        num_sink_tokens: Leading tokens that are always read.
    """

    window: int
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: got {self.window}, needs at least 1")
        if self.num_sink_tokens < 0:
            raise ValueError(f"num_sink_tokens: got {self.num_sink_tokens}, needs at least 0")

    def sink_blocks(self, block_size: int) -> int:
        """See `Group`."""
        return -(-self.num_sink_tokens // block_size)

    def first_needed(self, position: Any, block_size: int) -> Any:
        """See `Group`."""
        return _positive(position - self.window + 1) // block_size


@dataclass(frozen=True)
class Recurrent(Group):
    """State-space layers: block i holds the state after the last token written in it; a hit needs its last block."""

    @property
    def aligned(self) -> bool:
        """See `Group`: the state in the middle of a block is gone once the block is complete."""
        return True

    def first_needed(self, position: Any, block_size: int) -> Any:
        """See `Group`."""
        return _positive(position - 1) // block_size


def _positive(value: Any) -> Any:
    """The greater of `value` and 0, for integers and arrays alike."""
    return (value + abs(value)) // 2
