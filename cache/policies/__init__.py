"""Eviction policies by name."""

from __future__ import annotations

import importlib
import warnings
from collections import UserDict
from typing import TYPE_CHECKING, Any, TypeAlias

from .acquire import choose
from .base import Block, EvictionPolicy, PoolView
from .ghosts import Ghosts
from .lru import LRU
from .priority import Priority
from .run_queue import QueuedPolicy, RunQueue, compact_together, too_few

if TYPE_CHECKING:
    from .hazard import Hazard
else:

    def __getattr__(name: str) -> Any:
        if name == "Hazard":
            return POLICIES["hazard"]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Policies(UserDict[str, "type[EvictionPolicy] | str"]):
    """Policy classes by name. A value `module:class` is imported on first use.

    Deprecated names can be looked up, but are not listed.
    """

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in DEPRECATED

    def __getitem__(self, name: str) -> type[EvictionPolicy]:
        if name in DEPRECATED:
            current = DEPRECATED[name]
            warnings.warn(f"policy: {name!r} is a deprecated name of {current!r}", DeprecationWarning, stacklevel=3)
            name = current
        found = self.data[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = self.data[name] = getattr(importlib.import_module(module, __package__), attribute)
        return found


DEPRECATED = {"segmented": "default"}
"""Names of removed policies, and the policies that replace them."""

POLICIES = _Policies(
    lru=LRU,
    priority=Priority,
    hazard=".hazard:Hazard",
    default=".hazard:Hazard",
    lfu="..replay:LFU",
    fifo="..replay:FIFO",
    s3fifo="..replay:S3FIFO",
    arc="..replay:ARC",
)
"""Names that `CacheManager(policy=...)` accepts. Those of `pc.cache.replay` are for comparison only."""


PolicyLike: TypeAlias = "str | EvictionPolicy | type[EvictionPolicy]"


def make_policy(policy: PolicyLike) -> EvictionPolicy:
    """Return a policy, given its name, its class, or an instance that has no pool yet.

    Raises:
        ValueError: The name is unknown, or the instance already serves a pool.
        TypeError: The argument is of another type.

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
    "QueuedPolicy",
    "RunQueue",
    "choose",
    "compact_together",
    "make_policy",
    "too_few",
]
