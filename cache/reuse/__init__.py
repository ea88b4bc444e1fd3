"""Ways to reuse more than the leading whole blocks of a prompt; see `pc.cache.lookup.Reuse`."""

from __future__ import annotations

from ..lookup import Reuse
from ..pool import BlockPool
from .moved import MovedText
from .partial import PartialBlocks

USERS: dict[str, type[PartialBlocks] | type[MovedText]] = {"partial": PartialBlocks, "anywhere": MovedText}


def make_reuse(name: str, pool: BlockPool) -> Reuse:
    """Return a new index from `USERS`, by name, for the blocks of a pool."""
    return USERS[name](pool)
