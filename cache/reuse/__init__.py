"""Ways to reuse more than the leading whole blocks of a prompt; see `Reuse`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..hashing import Words
from ..lookup import Hit
from ..request import Request
from ..runs import Span
from .moved import MovedText
from .partial import PartialBlocks

REUSES: dict[str, type[PartialBlocks] | type[MovedText]] = {"partial": PartialBlocks, "anywhere": MovedText}
"""Classes of indexes by name. The constructor of each takes the pool whose blocks it indexes."""


class Reuse(Protocol):
    """A way to reuse more than the leading whole blocks of a prompt.

    The manager must have only one group of layers, which needs all its blocks. A verb is a function that changes the
    manager's state, such as `allocate`. `extend` runs in the middle of verbs, and may change only the request.
    `published` and `removed` run when a verb is complete, under the manager's lock. They may run twice for the same
    blocks. `CacheManager.reset` makes a new index.
    """

    def extend(self, request: Request, hit: Hit, reuse: str, segments: Sequence[Span] | None) -> Hit:
        """Return the hit with `borrowed` blocks and the tokens reused from them. Change nothing but the request.

        `reuse` and `segments` are those of `CacheManager.allocate`.
        """

    def published(self, request: Request, first: int, last: int) -> None:
        """Record that logical blocks [first, last) of a request are published."""

    def removed(self, words: Words) -> None:
        """Record that blocks with these hashes, `[blocks, words]`, were evicted."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the index."""
