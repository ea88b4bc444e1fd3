"""Learned eviction, which evicts the blocks that are least likely to be used again soon.

`policy` logs notifications and applies them to a table with a row for each request (`runs`). It remembers
evicted blocks as ghosts. `model` estimates hazard rates of reuse, with ghosts included. From them it computes a block's
score: how much it pays to keep the block. `victims` evicts the blocks with the lowest scores. A guard (`guard`)
simulates lru, and evicts in lru's order after the pool has lost hits against it.
"""

from __future__ import annotations

from .policy import Hazard

__all__ = ["Hazard"]
