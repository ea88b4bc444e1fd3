"""Learned eviction: evicts the blocks that are least likely to be asked for again soon.

`policy` logs notifications (`log`) and applies them to a row per request (`runs`). `model` estimates hazard rates of
reuse, evicted blocks included (`evicted`), and what a block is worth; `victims` evicts what is worth least. A guard
(`evicted`) simulates lru in a shadow cache, and evicts by it where it hits more.
"""

from __future__ import annotations

from .policy import Hazard

__all__ = ["Hazard"]
