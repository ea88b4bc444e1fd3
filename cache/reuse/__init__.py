"""Reuse of more than whole blocks that a prompt begins with: see `pc.cache.lookup.Reuse`. The core knows it by name."""

from __future__ import annotations

from ..lookup import Reuse
from ..pool import BlockPool
from .moved import MovedText
from .partial import PartialBlocks

USERS: dict[str, type[PartialBlocks] | type[MovedText]] = {"partial": PartialBlocks, "anywhere": MovedText}


def make_reuse(name: str, pool: BlockPool) -> Reuse:
    """Return one of `USERS` over the blocks of a pool."""
    return USERS[name](pool)
