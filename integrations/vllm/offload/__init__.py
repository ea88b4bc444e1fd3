"""For vLLM's offloading to host memory: eviction policies of `pc.cache`, and blocks on disk behind it.

vLLM takes both by this module's name: see docs/vllm.md. `pc_` and a policy's name is its class here.
"""

from typing import Any

from .policy import OffloadPolicy, policy_class
from .tier import TierManager

__all__ = ["OffloadPolicy", "TierManager", "policy_class"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return policy_class(name)
