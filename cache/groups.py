"""Groups of layers, and the blocks that each needs for a hit. One chain of hashes serves all groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..triton_ops._core.checks import check_integer

Mask = npt.NDArray[np.bool_]
"""For each block of a sequence, whether it is cached."""


@dataclass(frozen=True)
class Group:
    """A group of layers that share a block table.

    Args:
        num_blocks: Number of blocks in this group's own pool. None: the manager's num_blocks.

    Examples:
        >>> isinstance(pc.SlidingWindow(window=8), pc.Group)
        True
    """

    num_blocks: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.num_blocks is not None:
            object.__setattr__(self, "num_blocks", check_integer("num_blocks", self.num_blocks, 1, 30))

    holds_states: ClassVar[bool] = False
    """Whether a block holds a state of the whole sequence up to the block's end. Only a checkpoint fills such a block,
    and computing can continue only where such a block ends."""

    def sink_blocks(self, block_size: int) -> int:
        """Return the number of blocks at the start of the sequence that are always needed."""
        return 0

    def first_needed(self, position: Any, block_size: int) -> Any:
        """Return the first block, apart from sinks, that queries at or after `position` may read.

        `position` may be an array, which gives an array.
        """
        return 0

    def needed(self, position: int, end: int, block_size: int) -> npt.NDArray[np.int32]:
        """Return the blocks before block `end` that queries at or after `position` read, ascending."""
        first = min(self.first_needed(position, block_size), end)
        sinks = min(self.sink_blocks(block_size), first)
        return np.concatenate((np.arange(sinks, dtype=np.int32), np.arange(first, end, dtype=np.int32)))

    def servable(self, resident: Mask, num_tokens: int, block_size: int, room: int | None = None) -> Mask:
        """Return, for each hit length from 0 to `len(resident)` blocks, whether computing could continue after the hit.

        `resident` says for each block whether it is cached. The last of `num_tokens` is always computed. A hit that
        needs more than `room` blocks does not count.
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
    """Layers in which a query may read every earlier token. A hit needs all its blocks.

    Examples:
        >>> groups = [pc.FullAttention(), pc.SlidingWindow(window=8, num_blocks=8)]
        >>> manager = pc.CacheManager(16, block_size=4, groups=groups)
        >>> [pool.num_blocks for pool in manager.pools]
        [16, 8]
    """


@dataclass(frozen=True)
class Tensors(Group):
    """Per-token tensors (hidden states) of which all rows are wanted. A hit needs all its blocks.

    Examples:
        >>> manager = pc.CacheManager(16, block_size=4, groups=[pc.SlidingWindow(window=8), pc.Tensors()])
        >>> allocation, pairs = manager.allocate("a", range(40)), manager.commit("a", 40)
        >>> [int((manager.block_table("a", group) >= 0).sum()) for group in range(2)]  # of the window, and all
        [2, 10]
    """


@dataclass(frozen=True)
class SlidingWindow(Group):
    """Layers in which a query at p reads keys at t > p - window, and the first num_sink_tokens keys.

    Blocks behind the window are released.

    Args:
        window: Number of tokens that a query reads, its own included.
        num_sink_tokens: Number of leading tokens that are always read.

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
        """Return the number of blocks that hold sink tokens."""
        return -(-self.num_sink_tokens // block_size)

    def first_needed(self, position: Any, block_size: int) -> Any:
        """Return the block in which the window of a query at `position` starts."""
        return _positive(position - self.window + 1) // block_size


@dataclass(frozen=True)
class Recurrent(Group):
    """State-space layers, whose whole past is one state of fixed size.

    The engine owns the state with which a request computes. A block of this group is a copy of the state at the end of
    a block of tokens. `CacheManager.checkpoint` allocates it, and the caller copies the state to it. A hit needs the
    state at its end. `num_blocks` is the number of states that are kept.

    Examples:
        >>> manager = pc.CacheManager(16, block_size=4, groups=[pc.FullAttention(), pc.Recurrent(num_blocks=4)])
        >>> allocation = manager.allocate("a", range(10))
        >>> state = manager.checkpoint("a", 8)  # copy the state after 8 tokens to this block
        >>> merged = manager.commit("a", 10)
        >>> manager.allocate("b", range(10)).compute_spans
        [(8, 10)]
    """

    holds_states: ClassVar[bool] = True

    def first_needed(self, position: Any, block_size: int) -> Any:
        """Return the block of the token before `position`. At a block boundary, it holds the state to continue from."""
        return _positive(position - 1) // block_size


def _positive(value: Any) -> Any:
    """Return the greater of `value` and 0, for an integer or an array."""
    return (value + abs(value)) // 2
