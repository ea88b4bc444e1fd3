"""Eviction policies by name."""

from __future__ import annotations

from .base import Block, EvictionPolicy
from .lru import LRU

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "default": LRU}
"""What `CacheManager(policy=...)` accepts as a name."""


def make_policy(policy: str | EvictionPolicy | type[EvictionPolicy]) -> EvictionPolicy:
    """A policy from its name, its class, or an instance that has no pool yet.

    Raises:
        ValueError: An unknown name, or an instance that already serves a pool.
        TypeError: Anything else.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy: got {policy!r}, needs one of {', '.join(sorted(POLICIES))}")
        return POLICIES[policy]()
    if isinstance(policy, type) and issubclass(policy, EvictionPolicy):
        return policy()
    if isinstance(policy, EvictionPolicy):
        if hasattr(policy, "pool"):
            raise ValueError("policy: got an instance that already serves a pool, needs a fresh one")
        return policy
    raise TypeError(f"policy: got {type(policy).__name__}, needs a name, an EvictionPolicy or its class")


__all__ = ["LRU", "POLICIES", "Block", "EvictionPolicy", "make_policy"]
