"""Learned eviction: gives up the blocks that are least likely to be asked for again soon.

State per request (`runs`), what its end says (`endings`), what is remembered of evicted blocks (`evicted`, `ghosts`),
what is learned (`lives`, `tables`), who is given up (`victims`), and lru on paper as a guard (`guard`).
"""

from __future__ import annotations

from .policy import Hazard

__all__ = ["Hazard"]
