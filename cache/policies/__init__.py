"""Eviction policies by name."""

from __future__ import annotations

from .arc import ARC
from .base import Block, EvictionPolicy, RunQueue
from .fifo import FIFO, S3FIFO
from .ghosts import Ghosts
from .lfu import LFU
from .lru import LRU
from .priority import Priority
from .segmented import Segmented

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "segmented": Segmented,
    "priority": Priority,
    "default": Segmented,
}
"""What `CacheManager(policy=...)` accepts as a name; docs/policies.md has the evidence for the default."""


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


__all__ = [
    "ARC",
    "FIFO",
    "LFU",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "Block",
    "EvictionPolicy",
    "Ghosts",
    "Priority",
    "RunQueue",
    "Segmented",
    "make_policy",
]
