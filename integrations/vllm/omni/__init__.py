"""A cache of hidden states of prefix hits for vLLM-Omni, with vLLM-Omni's own interface, over a `TensorCache`."""

from .manager import OmniPrefixCacheManager
from .steps import GroupView, check_groups, make_view

__all__ = ["GroupView", "OmniPrefixCacheManager", "check_groups", "make_view"]
