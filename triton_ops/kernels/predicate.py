"""Attended keys and tiles in kernels, like `Mask` on the host. Other kernel files read only BOUNDED of its options."""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import TILE


@triton.jit
def _between(low, high, seq_len, key_begin, mask):
    """Return the keys from the start of the window of a query at `low` to the end of the range of a query at `high`.

    Sink tokens are left out. The end may be below the start.
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
    """Return live keys of queries at p_first to p_last: (lo, hi, tile_lo, tile_hi, sink_lo, sink_hi).

    Keys [lo, hi) lie in tiles [tile_lo, tile_hi). Sink tokens before these lie in tiles [sink_lo, sink_hi).
    """
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
    """Return the smaller of p_first and the last position whose query attends to key t."""
    return tl.minimum(p_first, t + mask.window - 1)


@triton.jit
def _full_span(p_first, p_last, seq_len, key_begin, mask):
    """Return the keys [lo, hi) to which all queries at positions p_first to p_last attend."""
    return _between(p_last, p_first, seq_len, key_begin, mask)


@triton.jit
def _row_spans(pos, seq_len, key_begin, mask):
    """Return the keys [lo, hi) of each query, without sink tokens. hi may be below lo."""
    lo, hi = _between(pos, pos, seq_len, key_begin, mask)
    none = tl.zeros_like(pos)
    return lo + none, hi + none


@triton.jit
def _ahead(t, key_begin):
    """Return the unsigned distance of keys t from key_begin, so that earlier keys are beyond every end."""
    return tl.cast(t - key_begin, tl.uint32, bitcast=True)


@triton.jit
def _within(ahead, lo, hi, key_begin, mask):
    """Return which keys, given by their distance `_ahead`, are in [lo, hi) or are sink tokens below hi."""
    live = ahead < _ahead(tl.maximum(hi, key_begin), key_begin)
    if mask.WINDOW:
        sink_end = _ahead(tl.maximum(mask.num_sink_tokens, key_begin), key_begin)
        live = live & ((ahead >= _ahead(tl.maximum(lo, key_begin), key_begin)) | (ahead < sink_end))
    return live


@triton.jit
def _live_blocks(live, begin, pos, mask, BLOCK_SIZE: tl.constexpr):
    """Return which blocks, starting at these keys, have a key to which a query at pos attends."""
    if mask.CAUSAL:
        live = live & (begin <= pos)
    if mask.WINDOW:
        live = live & ((begin + BLOCK_SIZE > pos - mask.window + 1) | (begin < mask.num_sink_tokens))
        if not mask.CAUSAL:
            live = live & (begin < pos + mask.window)
    return live


@triton.jit
def _sink_tiles(hi, key_begin, mask):
    """Return the end of the tiles with sink tokens below hi; 0 if there are none."""
    end = (tl.minimum(mask.num_sink_tokens, hi) + TILE - 1) // TILE
    return tl.where(mask.num_sink_tokens > key_begin, end, 0)
