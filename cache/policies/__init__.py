"""Eviction policies by name."""

from __future__ import annotations

from .base import Block, EvictionPolicy, PoolView
from .ghosts import Ghosts
from .hazard import Hazard
from .lru import LRU
from .priority import Priority
from .run_queue import RunQueue, compact_together, too_few
from .segmented import Segmented

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "segmented": Segmented,
    "priority": Priority,
    "hazard": Hazard,
    "default": Hazard,
}
"""What `CacheManager(policy=...)` accepts as a name; `pc.cache.replay` adds those that are there for comparison."""


def make_policy(policy: str | EvictionPolicy | type[EvictionPolicy]) -> EvictionPolicy:
    """A policy from its name, its class, or an instance that has no pool yet.

    Raises:
        ValueError: An unknown name, or an instance that already serves a pool.
        TypeError: Anything else.

    Examples:
        >>> from pc.cache.policies import make_policy
        >>> type(make_policy("lru")).__name__
        'LRU'
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


__all__ = [
    "LRU",
    "POLICIES",
    "Block",
    "EvictionPolicy",
    "Ghosts",
    "Hazard",
    "PoolView",
    "Priority",
    "RunQueue",
    "Segmented",
    "compact_together",
    "make_policy",
    "too_few",
]
