"""Layout of a plan: one int32 tensor whose size follows from shapes, so that a captured graph can refresh it in place.

    header   [HEADER]                   number of work items, then what the plan was made for
    info     [num_rows, INFO]           what INFO_FLAGS to INFO_LIVE name
    items    [max_items, ITEM]          what ITEM_ROW to ITEM_COUNT name
    tiles    [num_rows, max_tiles]      the live tiles, ascending
    ranks    [num_rows, max_tiles + 1]  live tiles before each tile

A row is a block table: a sequence, or a KV head of a sequence where each has a table of its own. A tile is 64 key
positions; it is live when one of its blocks is present.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

TILE_KEYS, HEADER_INTS, INFO_INTS, ITEM_INTS = 64, 16, 8, 4
# Columns of info: flags, first item, number of items, live tiles that a decode attends to, checksum of positions, ...
INFO_FLAGS, INFO_FIRST, INFO_ITEMS, INFO_ATTENDED = range(4)
INFO_CHECKSUM, INFO_QUERY_LEN, INFO_SEQ_LEN, INFO_LIVE = range(4, 8)
# Columns of items: the row, the first and the end of the item's live tiles, how many items the row has.
ITEM_ROW, ITEM_BEGIN, ITEM_END, ITEM_COUNT = range(4)
# Flags: some tile is dead; some live tile has an absent block.
DEAD_TILES, PARTIAL_TILES = 1, 2
# Sequences with at most this many queries are decoded from the work list; longer ones are tiled over their queries.
DECODE_QUERIES = 8
# Room for splits beyond one item per row: two for each of 128 processors. More would make their sum, which few
# programs do where there is one KV head, take more than a tenth of the attention.
EXTRA_ITEMS = 256
# A split below 4 tiles (256 keys) costs more in its merge than it saves.
MIN_SPLIT_TILES = 4


class PlanShape(NamedTuple):
    """Sizes that follow from the shapes of a call."""

    num_rows: int
    max_tiles: int

    @classmethod
    def of(cls, block_tables: torch.Tensor, block_size: int) -> PlanShape:
        """The plan's shape for these tables."""
        *rows, max_blocks = block_tables.shape
        return cls(math.prod(rows), -(-max_blocks * block_size // TILE_KEYS))

    @property
    def max_items(self) -> int:
        """One item per row, and as many splits as may pay off."""
        return self.num_rows + min(EXTRA_ITEMS, self.num_rows * (self.max_tiles // MIN_SPLIT_TILES))

    @property
    def size(self) -> int:
        """Elements of the plan tensor."""
        per_row = INFO_INTS + 2 * self.max_tiles + 1
        return HEADER_INTS + self.max_items * ITEM_INTS + self.num_rows * per_row


def plan_views(plan: torch.Tensor, shape: PlanShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """info, items, tiles and ranks of a plan, as views: `_plan_parts` on the host."""
    sizes = (INFO_INTS, ITEM_INTS, shape.max_tiles, shape.max_tiles + 1)
    rows = (shape.num_rows, shape.max_items, shape.num_rows, shape.num_rows)
    parts = plan[HEADER_INTS:].split([n * m for n, m in zip(rows, sizes, strict=True)])
    info, items, tiles, ranks = (part.view(n, m) for part, n, m in zip(parts, rows, sizes, strict=True))
    return info, items, tiles, ranks
