"""Block identity, eviction and the manager that hands out block tables; numpy only in the hot path."""

from __future__ import annotations

if __name__ != "pc.cache":
    raise ImportError(f"import pc.cache, not {__name__}: a second copy would not share its classes")

from . import replay as replay  # its policies get their names
from .allocation import Allocation, AppendedTokens, CacheStats, GroupedAllocation
from .groups import FullAttention, Group, Recurrent, SlidingWindow, Tensors
from .keys import KeyAt
from .manager import CacheManager, GroupedCacheManager
from .policies import EvictionPolicy
from .pool import OutOfBlocks
from .tensors.encoder_cache import EncoderCache, EncoderItem
from .tensors.row_store import MissingRowsError
from .tensors.step import Step
from .tensors.tensor_cache import TensorCache

__all__ = [
    "Allocation",
    "AppendedTokens",
    "CacheManager",
    "CacheStats",
    "EncoderCache",
    "EncoderItem",
    "EvictionPolicy",
    "FullAttention",
    "Group",
    "GroupedAllocation",
    "GroupedCacheManager",
    "KeyAt",
    "MissingRowsError",
    "OutOfBlocks",
    "Recurrent",
    "SlidingWindow",
    "Step",
    "TensorCache",
    "Tensors",
]
