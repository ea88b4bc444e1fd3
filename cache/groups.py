"""What a group of layers needs resident: one chain of hashes serves them all, each group has its own block table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..triton_ops._checks import check_integer

Mask = npt.NDArray[np.bool_]
"""Per block of a sequence, whether it is there."""


@dataclass(frozen=True)
class Group:
    """Layers that share a block table.

    Args:
        num_blocks: Blocks of this group's own pool; None: the manager's num_blocks.

    Examples:
        >>> isinstance(pc.SlidingWindow(window=8), pc.Group)
        True
    """

    num_blocks: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.num_blocks is not None:
            object.__setattr__(self, "num_blocks", check_integer("num_blocks", self.num_blocks, 1, 30))

    holds_states: ClassVar[bool] = False
    """Whether a block is a state of the whole sequence up to its end, which only a checkpoint fills: computing can then
    go on at the end of such a block alone."""

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

    def servable(self, resident: Mask, num_tokens: int, block_size: int, room: int | None = None) -> Mask:
        """For every length of a hit in blocks, 0 to `len(resident)`: whether computing could go on behind it.

        Of `num_tokens` the last is always computed; `room` limits the blocks that may be needed.
        """
        missing = np.concatenate(([0], np.cumsum(~resident)))
        lengths = np.arange(resident.size + 1)
        positions = np.minimum(lengths * block_size, max(num_tokens - 1, 0))
        first = np.minimum(self.first_needed(positions, block_size), lengths)
        sinks = np.minimum(self.sink_blocks(block_size), first)
        fits: Mask = (missing[lengths] == missing[first]) & (missing[sinks] == 0)
        if self.holds_states:
            fits &= lengths * block_size <= max(num_tokens - 1, 0)
        if room is not None:
            fits &= sinks + lengths - first <= room
        return fits


@dataclass(frozen=True)
class FullAttention(Group):
    """Every earlier token may be read: a hit needs all its blocks.

    Examples:
        >>> groups = [pc.FullAttention(), pc.SlidingWindow(window=8, num_blocks=8)]
        >>> manager = pc.CacheManager(16, block_size=4, groups=groups)
        >>> [pool.num_blocks for pool in manager.pools]
        [16, 8]
    """


@dataclass(frozen=True)
class Tensors(Group):
    """Per-token tensors (hidden states) that are wanted whole: a hit needs all its blocks.

    Examples:
        >>> manager = pc.CacheManager(16, block_size=4, groups=[pc.SlidingWindow(window=8), pc.Tensors()])
        >>> allocation, pairs = manager.allocate("a", range(40)), manager.commit("a", 40)
        >>> [int((manager.block_table("a", group) >= 0).sum()) for group in range(2)]  # the window's, and all
        [2, 10]
    """


@dataclass(frozen=True)
class SlidingWindow(Group):
    """A query at p reads t > p - window and t < num_sink_tokens; blocks behind the window are released.

    Args:
        window: Tokens, the query's own included.
        num_sink_tokens: Leading tokens that are always read.

    Examples:
        >>> manager = pc.CacheManager(16, block_size=4, groups=(pc.SlidingWindow(window=8, num_sink_tokens=4),))
        >>> allocation, merged = manager.allocate("a", range(24)), manager.commit("a", 24)
        >>> manager.block_table("a").tolist()  # -1: behind the window, and not a sink
        [0, -1, -1, -1, 4, 5]
    """

    window: int
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "window", check_integer("window", self.window, 1))
        object.__setattr__(self, "num_sink_tokens", check_integer("num_sink_tokens", self.num_sink_tokens, 0))

    def sink_blocks(self, block_size: int) -> int:
        """Blocks that hold sink tokens."""
        return -(-self.num_sink_tokens // block_size)

    def first_needed(self, position: Any, block_size: int) -> Any:
        """The block that the window of a query at `position` begins in."""
        return _positive(position - self.window + 1) // block_size


@dataclass(frozen=True)
class Recurrent(Group):
    """State-space layers, whose whole past is one state of fixed size.

    The state that a request computes with is the engine's own. A block of this group is a copy of it at the end of a
    block of tokens, taken with `CacheManager.checkpoint` where a forward pass left one; a hit needs the one at its
    end. `num_blocks` is then the number of states that are kept.

    Examples:
        >>> manager = pc.CacheManager(16, block_size=4, groups=[pc.FullAttention(), pc.Recurrent(num_blocks=4)])
        >>> allocation = manager.allocate("a", range(10))
        >>> state = manager.checkpoint("a", 8)  # copy the state behind token 8 to this block
        >>> merged = manager.commit("a", 10)
        >>> manager.allocate("b", range(10)).compute_spans
        [(8, 10)]
    """

    holds_states: ClassVar[bool] = True

    def first_needed(self, position: Any, block_size: int) -> Any:
        """The block whose end is the last boundary before `position`."""
        return _positive(position - 1) // block_size


def _positive(value: Any) -> Any:
    """The greater of `value` and 0, for integers and arrays alike."""
    return (value + abs(value)) // 2
