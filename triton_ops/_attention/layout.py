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
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .._triton import INTERPRET, tl, triton

TILE_KEYS, HEADER_INTS, INFO_INTS, ITEM_INTS = 64, 16, 8, 4


def kernel_constants(*values: int) -> Iterator[Any]:
    """Numbers for kernels; the interpreter runs their code as Python, where numbers are what they are."""
    return (value if INTERPRET else tl.constexpr(value) for value in values)


TILE, HEADER, INFO, ITEM = kernel_constants(TILE_KEYS, HEADER_INTS, INFO_INTS, ITEM_INTS)
# Columns of info: flags, first item, number of items, live tiles that a decode attends to, checksum of positions, ...
INFO_FLAGS, INFO_FIRST, INFO_ITEMS, INFO_ATTENDED = kernel_constants(0, 1, 2, 3)
INFO_CHECKSUM, INFO_QUERY_LEN, INFO_SEQ_LEN, INFO_LIVE = kernel_constants(4, 5, 6, 7)
# Columns of items: the row, the first and the end of the item's live tiles, how many items the row has.
ITEM_ROW, ITEM_BEGIN, ITEM_END, ITEM_COUNT = kernel_constants(0, 1, 2, 3)
# Flags: some tile is dead; some live tile has an absent block.
DEAD_TILES, PARTIAL_TILES = kernel_constants(1, 2)
# Arguments of the kernels that differ from step to step: nothing is compiled for their values.
LENGTHS = [
    *("num_seqs", "num_tokens", "max_tiles", "max_items", "max_q", "num_splits", "target_items", "extra_items"),
    *("decode_queries", "by_sequence", "key_begin", "num_rows", "top_k", "max_blocks", "max_union", "tree_keys"),
    *("stride_bt", "stride_bh", "stride_tree", "stride_lq", "stride_lh", "stride_marks"),
]
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


@triton.jit
def _plan_parts(plan_ptr, num_rows, max_tiles, max_items):
    """Where info, items, tiles and ranks begin."""
    info_ptr = plan_ptr + HEADER
    items_ptr = info_ptr + tl.cast(num_rows, tl.int64) * INFO
    tiles_ptr = items_ptr + tl.cast(max_items, tl.int64) * ITEM
    ranks_ptr = tiles_ptr + tl.cast(num_rows, tl.int64) * max_tiles
    return info_ptr, items_ptr, tiles_ptr, ranks_ptr


@triton.jit
def _plan_rows(plan_ptr, row, num_rows, max_tiles, max_items):
    """Where a row's info, tiles and ranks begin."""
    info_ptr, _, tiles_ptr, ranks_ptr = _plan_parts(plan_ptr, num_rows, max_tiles, max_items)
    row64 = tl.cast(row, tl.int64)
    return info_ptr + row64 * INFO, tiles_ptr + row64 * max_tiles, ranks_ptr + row64 * (max_tiles + 1)


def plan_views(plan: torch.Tensor, shape: PlanShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """info, items, tiles and ranks of a plan, as views: `_plan_parts` on the host."""
    sizes = (INFO_INTS, ITEM_INTS, shape.max_tiles, shape.max_tiles + 1)
    rows = (shape.num_rows, shape.max_items, shape.num_rows, shape.num_rows)
    parts = plan[HEADER_INTS:].split([n * m for n, m in zip(rows, sizes, strict=True)])
    info, items, tiles, ranks = (part.view(n, m) for part, n, m in zip(parts, rows, sizes, strict=True))
    return info, items, tiles, ranks
