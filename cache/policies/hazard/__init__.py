"""Learned eviction: gives up the blocks that are least likely to be asked for again soon; the default.

state per request (`runs`), what is remembered of evicted blocks (`ghosts`), what is learned (`lives`, `tables`), who is
given up (`victims`), and lru on paper as a guard (`guard`).
"""

from __future__ import annotations

from .policy import Hazard

__all__ = ["Hazard"]
