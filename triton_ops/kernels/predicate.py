"""Attended keys and tiles in kernels, as `Mask` says on the host; other kernels know no option but BOUNDED."""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import TILE


@triton.jit
def _between(low, high, seq_len, key_begin, mask):
    """Keys from where the window of a query at `low` begins to where the attended range of one at `high` ends.

    Sink tokens are left out; the end may lie below the beginning.
    """
    lo = key_begin
    hi = seq_len
    if mask.CAUSAL:
        hi = tl.minimum(hi, high + 1)
    if mask.WINDOW:
        lo = tl.maximum(lo, low - mask.window + 1)
        if not mask.CAUSAL:
            hi = tl.minimum(hi, high + mask.window)
    return lo, hi


@triton.jit
def _span(p_first, p_last, seq_len, key_begin, mask):
    """Live keys [lo, hi) and sink tokens below lo, of queries at positions p_first to p_last; and both in tiles."""
    lo, hi = _between(p_first, p_last, seq_len, key_begin, mask)
    lo = tl.minimum(tl.maximum(lo, 0), seq_len)
    hi = tl.maximum(hi, lo)
    tile_lo = tl.where(hi > lo, lo // TILE, (lo + TILE - 1) // TILE)
    tile_hi = tl.where(hi > lo, (hi + TILE - 1) // TILE, tile_lo)
    sink_lo = tile_lo
    sink_hi = tile_lo
    if mask.WINDOW:
        limit = seq_len
        if mask.CAUSAL:
            limit = tl.minimum(limit, p_last + 1)
        limit = tl.minimum(limit, mask.num_sink_tokens)
        sink_lo = tl.minimum(key_begin // TILE, tile_lo)
        sink_hi = tl.where(limit > key_begin, tl.minimum((limit + TILE - 1) // TILE, tile_lo), sink_lo)
        sink_hi = tl.maximum(sink_hi, sink_lo)
    return lo, hi, tile_lo, tile_hi, sink_lo, sink_hi


@triton.jit
def _attending_from(p_first, t, mask):
    """p_first, or the last position before it whose query attends to key t."""
    return tl.minimum(p_first, t + mask.window - 1)


@triton.jit
def _full_span(p_first, p_last, seq_len, key_begin, mask):
    """Keys [lo, hi) that all of the queries at positions p_first to p_last attend to."""
    return _between(p_last, p_first, seq_len, key_begin, mask)


@triton.jit
def _row_spans(pos, seq_len, key_begin, mask):
    """Keys [lo, hi) of each query, sink tokens left out; hi may lie below lo."""
    lo, hi = _between(pos, pos, seq_len, key_begin, mask)
    none = tl.zeros_like(pos)
    return lo + none, hi + none


@triton.jit
def _ahead(t, key_begin):
    """How far keys t are from key_begin on; unsigned, so that those before it are beyond every end."""
    return tl.cast(t - key_begin, tl.uint32, bitcast=True)


@triton.jit
def _within(ahead, lo, hi, key_begin, mask):
    """Which keys so far `_ahead` are in [lo, hi), or sink tokens below hi."""
    live = ahead < _ahead(tl.maximum(hi, key_begin), key_begin)
    if mask.WINDOW:
        sink_end = _ahead(tl.maximum(mask.num_sink_tokens, key_begin), key_begin)
        live = live & ((ahead >= _ahead(tl.maximum(lo, key_begin), key_begin)) | (ahead < sink_end))
    return live


@triton.jit
def _live_blocks(live, begin, pos, mask, BLOCK_SIZE: tl.constexpr):
    """Which of some blocks, that begin at these keys, have one that a query at pos attends to."""
    if mask.CAUSAL:
        live = live & (begin <= pos)
    if mask.WINDOW:
        live = live & ((begin + BLOCK_SIZE > pos - mask.window + 1) | (begin < mask.num_sink_tokens))
        if not mask.CAUSAL:
            live = live & (begin < pos + mask.window)
    return live


@triton.jit
def _sink_tiles(hi, key_begin, mask):
    """Where the tiles of sink tokens below hi end; 0 where there are none."""
    end = (tl.minimum(mask.num_sink_tokens, hi) + TILE - 1) // TILE
    return tl.where(mask.num_sink_tokens > key_begin, end, 0)
