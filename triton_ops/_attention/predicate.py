"""Which keys a group of queries may attend to, as ranges of keys and of tiles."""

from __future__ import annotations

import numpy as np

from .._triton import tl, triton
from .layout import TILE, TILE_KEYS, PlanOptions


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


def reached_tiles(positions: np.ndarray, seq_len: int, num_tiles: int, options: PlanOptions) -> np.ndarray:
    """`_span` in numpy: which tiles hold a key that queries at ascending positions may attend to."""
    keys = np.arange(num_tiles * TILE_KEYS)
    first, last = int(positions[0]), int(positions[-1])
    live = (keys < seq_len) & (keys >= options.key_begin)
    if options.causal:
        live &= keys <= last
    if options.window:
        inside = keys > first - options.window
        if not options.causal:
            inside &= keys < last + options.window
        live &= inside | (keys < options.num_sink_tokens)
    return np.asarray(live.reshape(num_tiles, TILE_KEYS).any(axis=1))


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
