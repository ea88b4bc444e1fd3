"""Block identity, eviction policies, and the manager of block tables. The manager's hot path uses numpy only."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "pc.cache":
    raise ImportError(f"import pc.cache, not {__name__}: a second copy would not share its classes")

from .allocation import Allocation, AppendedTokens, GroupedAllocation, Pairs
from .groups import FullAttention, Group, Recurrent, SlidingWindow, Tensors
from .keys import KeyAt
from .manager import CacheManager
from .observe.explain import Explanation
from .observe.stats import CacheStats
from .policies import EvictionPolicy
from .pool import OutOfBlocks
from .runs import MovedSpan, Slots
from .tensors.encoder import EncoderCache, EncoderItem
from .tensors.rows import MissingRowsError
from .tensors.step import Step
from .tensors.tensor_cache import TensorCache

GroupedCacheManager = CacheManager[GroupedAllocation, list[Pairs], tuple[Slots, ...]]
"""A manager of several groups, for type annotations.

Examples:
    >>> def tables(manager: pc.GroupedCacheManager, request_id: str) -> list[list[int]]:
    ...     return [manager.block_table(request_id, group).tolist() for group in range(len(manager.groups))]
    >>> groups = [pc.FullAttention(), pc.SlidingWindow(window=4)]
    >>> manager = pc.GroupedCacheManager(num_blocks=8, block_size=4, groups=groups)
    >>> allocation: pc.GroupedAllocation = manager.allocate("a", range(10))
    >>> merged = manager.commit("a", 10)
    >>> tables(manager, "a"), [slots.tolist() for slots in allocation.slot_mapping]  # one entry for each group
    ([[0, 1, 2], [-1, 1, 2]], [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
"""

if TYPE_CHECKING:
    from . import replay as replay
else:  # with __getattr__ visible, type checkers would accept any attribute name

    def __getattr__(name: str) -> Any:
        if name == "replay":  # imported on first use, because no manager needs it
            return importlib.import_module(".replay", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Allocation",
    "AppendedTokens",
    "CacheManager",
    "CacheStats",
    "EncoderCache",
    "EncoderItem",
    "EvictionPolicy",
    "Explanation",
    "FullAttention",
    "Group",
    "GroupedAllocation",
    "GroupedCacheManager",
    "KeyAt",
    "MissingRowsError",
    "MovedSpan",
    "OutOfBlocks",
    "Recurrent",
    "SlidingWindow",
    "Step",
    "TensorCache",
    "Tensors",
]
