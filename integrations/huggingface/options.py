"""What a user chose when he enabled caching, in one piece from there to where it is made."""

from __future__ import annotations

import os
from typing import Any, NamedTuple


class Options(NamedTuple):
    """Of the cache of one model.

    Attributes:
        num_blocks: Blocks of the cache; None: see `default_num_blocks`.
        block_size: Tokens of a block.
        policy: See `CacheManager`.
        reuse: See `CacheManager.allocate`.
        host_blocks: Evicted blocks that are kept in host memory.
        disk: Directory of evicted blocks; None: they are not kept on disk.
        disk_bytes: Bytes of those at most; None: no limit.
        window_blocks: Blocks of layers with a window; None: as many as of others.
    """

    num_blocks: int | None
    block_size: int
    policy: Any
    reuse: str
    host_blocks: int
    disk: str | os.PathLike[str] | None
    disk_bytes: int | None
    window_blocks: int | None
