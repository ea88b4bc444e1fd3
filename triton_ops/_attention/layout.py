"""The layout of a plan: one int32 tensor whose size depends only on shapes, so that a graph can refresh it in place.

    header   [HEADER]                   number of work items, then the options for which the plan was built
    info     [num_rows, INFO]           columns INFO_FLAGS to INFO_LIVE
    items    [max_items, ITEM]          columns ITEM_ROW to ITEM_COUNT
    tiles    [num_rows, max_tiles]      the live tiles, ascending
    ranks    [num_rows, max_tiles + 1]  number of live tiles before each tile

A row is a block table: of a sequence, or of a KV head of a sequence if each head has its own table. A tile is 64 key
positions. It is live if one of its blocks is present.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

TILE_KEYS, HEADER_INTS, INFO_INTS, ITEM_INTS = 64, 16, 8, 4
# Columns of info: flags, first item, number of items, live tiles that a decode attends to, checksum of positions, ...
INFO_FLAGS, INFO_FIRST, INFO_ITEMS, INFO_ATTENDED = range(4)
INFO_CHECKSUM, INFO_QUERY_LEN, INFO_SEQ_LEN, INFO_LIVE = range(4, 8)
# Columns of items: the row, the first and the end of the item's live tiles, the number of the row's items.
ITEM_ROW, ITEM_BEGIN, ITEM_END, ITEM_COUNT = range(4)
# Flags: some tile is dead; some live tile has an absent block.
DEAD_TILES, PARTIAL_TILES = 1, 2
# Sequences with at most this many queries are decoded from the work list. Longer ones are tiled over their queries.
DECODE_QUERIES = 8
# Room for splits beyond one item per row: two for each of 128 processors. With more splits, the merge would take more
# than a tenth of the attention's time, because few programs compute the merge if there is one KV head.
EXTRA_ITEMS = 256
# The merge of a split below 4 tiles (256 keys) costs more than the split saves.
MIN_SPLIT_TILES = 4


class PlanShape(NamedTuple):
    """Sizes of a plan, which follow from the shapes of a call."""

    num_rows: int
    max_tiles: int

    @classmethod
    def of(cls, block_tables: torch.Tensor, block_size: int) -> PlanShape:
        """Return the plan's shape for these block tables."""
        *rows, max_blocks = block_tables.shape
        return cls(math.prod(rows), -(-max_blocks * block_size // TILE_KEYS))

    @property
    def num_keys(self) -> int:
        """Number of keys in all tiles of a row."""
        return self.max_tiles * TILE_KEYS

    @property
    def max_items(self) -> int:
        """Maximum number of items: one for each row, and as many splits as may pay off."""
        return self.num_rows + min(EXTRA_ITEMS, self.num_rows * (self.max_tiles // MIN_SPLIT_TILES))

    @property
    def size(self) -> int:
        """Number of elements of the plan tensor."""
        per_row = INFO_INTS + 2 * self.max_tiles + 1
        return HEADER_INTS + self.max_items * ITEM_INTS + self.num_rows * per_row


def plan_views(plan: torch.Tensor, shape: PlanShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return info, items, tiles and ranks of a plan as views; `_plan_parts` does this in kernels."""
    sizes = (INFO_INTS, ITEM_INTS, shape.max_tiles, shape.max_tiles + 1)
    rows = (shape.num_rows, shape.max_items, shape.num_rows, shape.num_rows)
    parts = plan[HEADER_INTS:].split([n * m for n, m in zip(rows, sizes, strict=True)])
    info, items, tiles, ranks = (part.view(n, m) for part, n, m in zip(parts, rows, sizes, strict=True))
    return info, items, tiles, ranks
