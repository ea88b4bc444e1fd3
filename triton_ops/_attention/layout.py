"""Layout of a plan: one int32 tensor whose size follows from shapes, so that a captured graph can refresh it in place.

    header   [HEADER]                   number of work items, then what the plan was made for
    info     [num_seqs, INFO]           flags, first item, items, live tiles in reach, checksum of the positions,
                                        q_len, seq_len, live tiles
    items    [max_items, ITEM]          sequence, first and end of a range of its live tiles, items of the sequence
    tiles    [num_seqs, max_tiles]      the live tiles, ascending
    ranks    [num_seqs, max_tiles + 1]  live tiles before each tile

A tile is 64 key positions; it is live when one of its blocks is present. Flag 1: some tile is dead; flag 2: some tile
has an absent block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._triton import tl

TILE_KEYS, HEADER_INTS, INFO_INTS, ITEM_INTS = 64, 16, 8, 4
TILE, HEADER, INFO, ITEM = (tl.constexpr(n) for n in (TILE_KEYS, HEADER_INTS, INFO_INTS, ITEM_INTS))
# Sequences with at most this many queries are decoded from the work list; longer ones are tiled over their queries.
DECODE_QUERIES = 8
# Room for splits beyond one item per sequence: 132 SMs, four programs each, one KV head.
EXTRA_ITEMS = 528
# A split below 4 tiles (256 keys) costs more in its merge than it saves.
MIN_SPLIT_TILES = 4


@dataclass(frozen=True)
class PlanShape:
    """Sizes that follow from the shapes of a call."""

    num_seqs: int
    max_tiles: int

    @classmethod
    def of(cls, block_tables: torch.Tensor, block_size: int) -> PlanShape:
        """The plan's shape for these tables."""
        return cls(block_tables.shape[0], -(-block_tables.shape[1] * block_size // TILE_KEYS))

    @property
    def max_items(self) -> int:
        """One item per sequence, and as many splits as may pay off."""
        return self.num_seqs + min(EXTRA_ITEMS, self.num_seqs * (self.max_tiles // MIN_SPLIT_TILES))

    @property
    def size(self) -> int:
        """Elements of the plan tensor."""
        per_seq = INFO_INTS + 2 * self.max_tiles + 1
        return HEADER_INTS + self.max_items * ITEM_INTS + self.num_seqs * per_seq


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is made for besides its tensors."""

    causal: bool = True
    window: int = 0
    num_sink_tokens: int = 0
    decode_queries: int = DECODE_QUERIES
    key_begin: int = 0

    def header(self) -> list[int]:
        """The integers of the header from its second on."""
        return [int(self.causal), self.window, self.num_sink_tokens, self.decode_queries, self.key_begin]
