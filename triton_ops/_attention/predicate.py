"""Which keys a group of queries may attend to, as ranges of keys and of tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._triton import tl, triton
from .layout import TILE, TILE_KEYS


class Mask(NamedTuple):
    """The predicate's options: which keys a query attends to, of those that are present."""

    window: int
    num_sink_tokens: int
    CAUSAL: bool
    WINDOW: bool

    @property
    def is_unbounded(self) -> bool:
        """Whether a query attends to all keys before it, however far."""
        return not self.WINDOW

    def is_whole(self, last: int) -> bool:
        """Whether queries up to position `last` attend to all keys before them, and where not causal behind them."""
        return not self.WINDOW or (self.CAUSAL and last < self.window)

    def reach(self, first: int, last: int, seq_len: int) -> tuple[int, int, int]:
        """Keys in reach of queries at positions first to last: [0, sink_end) and [begin, end), as these three."""
        begin, end = 0, min(seq_len, last + 1) if self.CAUSAL else seq_len
        if self.WINDOW:
            begin = max(0, first - self.window + 1)
            if not self.CAUSAL:
                end = min(end, last + self.window)
        end = max(0, end)
        begin = min(begin, end)
        return min(self.num_sink_tokens, begin), begin, end

    def live(self, t: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which keys at positions t queries attend to: `[queries, keys]`."""
        p = positions[:, None]
        live = np.ones((len(positions), len(t)), dtype=bool)
        if self.CAUSAL:
            live &= t <= p
        if self.WINDOW:
            live &= (t > p - self.window) | (t < self.num_sink_tokens)
            if not self.CAUSAL:
                live &= t < p + self.window
        return live

    def reached_tiles(self, positions: np.ndarray, seq_len: int, num_tiles: int, key_begin: int) -> np.ndarray:
        """Which tiles hold a key from key_begin on that queries at ascending positions may attend to."""
        keys = np.arange(num_tiles * TILE_KEYS)
        sink_end, begin, end = self.reach(int(positions[0]), int(positions[-1]), seq_len)
        live = (keys >= key_begin) & (keys < end) & ((keys < sink_end) | (keys >= begin))
        return np.asarray(live.reshape(num_tiles, TILE_KEYS).any(axis=1))


@triton.jit
def _span(
    p_first, p_last, seq_len, key_begin, window, num_sink_tokens,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Live keys [lo, hi) and sink tokens below lo, of queries at positions p_first to p_last; and both in tiles."""
    hi = seq_len
    lo = key_begin
    if CAUSAL:
        hi = tl.minimum(hi, p_last + 1)
    if WINDOW:
        if not CAUSAL:
            hi = tl.minimum(hi, p_last + window)
        lo = tl.maximum(lo, p_first - window + 1)
    lo = tl.minimum(tl.maximum(lo, 0), seq_len)
    hi = tl.maximum(hi, lo)
    tile_lo = tl.where(hi > lo, lo // TILE, (lo + TILE - 1) // TILE)
    tile_hi = tl.where(hi > lo, (hi + TILE - 1) // TILE, tile_lo)
    sink_lo = tile_lo
    sink_hi = tile_lo
    if WINDOW:
        limit = seq_len
        if CAUSAL:
            limit = tl.minimum(limit, p_last + 1)
        limit = tl.minimum(limit, num_sink_tokens)
        sink_lo = tl.minimum(key_begin // TILE, tile_lo)
        sink_hi = tl.where(limit > key_begin, tl.minimum((limit + TILE - 1) // TILE, tile_lo), sink_lo)
        sink_hi = tl.maximum(sink_hi, sink_lo)
    return lo, hi, tile_lo, tile_hi, sink_lo, sink_hi


@triton.jit
def _live_scores(t, pos, window, num_sink_tokens, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of keys t queries at pos attend to, of those that are present: [queries, keys]."""
    live = t[None, :] >= 0
    if CAUSAL:
        live = t[None, :] <= pos[:, None]
    if WINDOW:
        live = live & ((t[None, :] > pos[:, None] - window) | (t[None, :] < num_sink_tokens))
        if not CAUSAL:
            live = live & (t[None, :] < pos[:, None] + window)
    return live


@triton.jit
def _whole_tile_queries(q_len, seq_len, has_partial, DECODE_Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    """How many first queries of a sequence `specialized.py` takes: whole tiles of keys, BLOCK_Q queries at once."""
    whole = tl.minimum(q_len, seq_len // TILE * TILE - (seq_len - q_len))
    return tl.where(has_partial | (q_len <= DECODE_Q), 0, tl.maximum(whole, 0) // BLOCK_Q * BLOCK_Q)
