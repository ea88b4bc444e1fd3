"""Eviction policies of `pc.cache` for vLLM's block pool, and the hints that requests carry for them."""

from ...hints import Hint, HintRange, read_hint, retention_hints
from .pool import PolicyBlockPool, install_policy
from .scheduler import AsyncPolicyScheduler, PolicyScheduler

__all__ = [
    "AsyncPolicyScheduler",
    "Hint",
    "HintRange",
    "PolicyBlockPool",
    "PolicyScheduler",
    "install_policy",
    "read_hint",
    "retention_hints",
]
