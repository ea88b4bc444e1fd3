"""Eviction policies of `pc.cache` behind vLLM's block pool, and hints of its callers to them."""

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
