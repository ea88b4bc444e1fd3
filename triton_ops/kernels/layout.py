"""The parts and columns of a plan, for kernels; see `_attention/layout.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from .._attention import layout
from .._core.runtime import INTERPRET


def kernel_constants(*values: int) -> Iterator[Any]:
    """Return constants for kernels. The interpreter runs kernels as Python, so it gets plain numbers."""
    return (value if INTERPRET else tl.constexpr(value) for value in values)


TILE, HEADER, INFO, ITEM = kernel_constants(
    layout.TILE_KEYS, layout.HEADER_INTS, layout.INFO_INTS, layout.ITEM_INTS
)  # fmt: skip
INFO_FLAGS, INFO_FIRST, INFO_ITEMS, INFO_ATTENDED, INFO_CHECKSUM, INFO_QUERY_LEN, INFO_SEQ_LEN, INFO_LIVE = (
    kernel_constants(
        layout.INFO_FLAGS, layout.INFO_FIRST, layout.INFO_ITEMS, layout.INFO_ATTENDED,
        layout.INFO_CHECKSUM, layout.INFO_QUERY_LEN, layout.INFO_SEQ_LEN, layout.INFO_LIVE,
    )
)  # fmt: skip
ITEM_ROW, ITEM_BEGIN, ITEM_END, ITEM_COUNT = kernel_constants(
    layout.ITEM_ROW, layout.ITEM_BEGIN, layout.ITEM_END, layout.ITEM_COUNT
)
DEAD_TILES, PARTIAL_TILES = kernel_constants(layout.DEAD_TILES, layout.PARTIAL_TILES)


@triton.jit
def _plan_parts(plan_ptr, num_rows, max_tiles, max_items):
    """Return pointers to info, items, tiles and ranks."""
    info_ptr = plan_ptr + HEADER
    items_ptr = info_ptr + tl.cast(num_rows, tl.int64) * INFO
    tiles_ptr = items_ptr + tl.cast(max_items, tl.int64) * ITEM
    ranks_ptr = tiles_ptr + tl.cast(num_rows, tl.int64) * max_tiles
    return info_ptr, items_ptr, tiles_ptr, ranks_ptr


@triton.jit
def _plan_rows(plan_ptr, row, num_rows, max_tiles, max_items):
    """Return pointers to a row's info, tiles and ranks."""
    info_ptr, _, tiles_ptr, ranks_ptr = _plan_parts(plan_ptr, num_rows, max_tiles, max_items)
    row64 = tl.cast(row, tl.int64)
    return info_ptr + row64 * INFO, tiles_ptr + row64 * max_tiles, ranks_ptr + row64 * (max_tiles + 1)
