"""The blocks as the parts of transformers' cache that its buffers and its offloading look at."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .blocks import ScheduledBlocks

NAME = "full_attention"
"""The one name that transformers' buffers know the blocks by, whatever layers they belong to."""


class Allocator:
    """The blocks as transformers' buffers and its offloading see them."""

    index = 0
    layer_type = NAME
    blocks_per_sector = 1

    def __init__(self, blocks: ScheduledBlocks) -> None:
        self._blocks = weakref.ref(blocks)
        self.block_table: dict[str, list[int]] = {}
        self.tokens_per_page = blocks.manager.block_size
        self.bytes_per_block = blocks.bytes_per_sector
        self.write_trash_index = self.read_trash_index = 0

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Tokens of a request at the end of a step."""
        return past_length + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """See `ScheduledBlocks.blocks_needed`."""
        blocks = self._blocks()
        return 0 if blocks is None else blocks.blocks_needed(request_id, past_length, query_length)


class NoSectors:
    """Blocks are not dealt out to kinds of layers in sectors."""

    def try_to_free_sectors(self) -> None:
        """Nothing."""
