"""In place of vLLM-Omni's cache of hidden states behind prefix hits: its calls, on a `TensorCache`."""

from .manager import OmniPrefixCacheManager
from .steps import GroupView, check_groups, make_view

__all__ = ["GroupView", "OmniPrefixCacheManager", "check_groups", "make_view"]
