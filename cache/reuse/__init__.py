"""Ways to reuse more than the leading whole blocks of a prompt.

Each is an index of a pool's published blocks, with these members:

- `extend(request, hit, reuse, segments)` returns the hit with `borrowed` blocks and the tokens reused from them.
- `published(request, first, last)` records that logical blocks [first, last) of a request are published.
- `removed(words)` records that blocks with these hashes, `[blocks, words]`, were evicted.
- `nbytes` is the number of bytes of the index.

A verb is a function that changes the manager's state, such as `allocate`. `extend` runs in the middle of verbs, and may
change only the request. Its last two arguments are those of `CacheManager.allocate`. `published` and `removed` run when
a verb is complete, under the manager's lock. They may run twice for the same blocks. `CacheManager.reset` makes a new
index. The manager must have only one group of layers, which needs all its blocks.
"""

from __future__ import annotations

from typing import TypeAlias

from .moved import MovedText
from .partial import PartialBlocks

Reuse: TypeAlias = "PartialBlocks | MovedText"

REUSES: dict[str, type[PartialBlocks] | type[MovedText]] = {"partial": PartialBlocks, "anywhere": MovedText}
"""Classes of indexes by name. The constructor of each takes the pool whose blocks it indexes."""
