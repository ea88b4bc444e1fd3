"""Eviction policies of `pc.cache` for vLLM's offloading to host memory, and a tier on disk below it.

Both are loaded by the name of this module; see docs/vllm_tiers.md. The name of a policy's class is `pc_` and the
policy's name.
"""

from typing import Any

from .policy import OffloadPolicy, policy_class
from .tier import TierManager

__all__ = ["OffloadPolicy", "TierManager", "policy_class"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return policy_class(name)
