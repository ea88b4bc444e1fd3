"""A cache of hidden states behind prefix hits for vLLM-Omni, with the calls of its own, over a `TensorCache`."""

from .manager import OmniPrefixCacheManager
from .steps import GroupView, check_groups, make_view

__all__ = ["GroupView", "OmniPrefixCacheManager", "check_groups", "make_view"]
