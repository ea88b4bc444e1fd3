"""Which keys a query attends to: the predicate's options, and what follows from them.

Kernels ask the functions below for attended keys and tiles, the CPU and plans the methods of `Mask`; nothing else knows
an option but for BOUNDED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .._triton import tl, triton
from .layout import TILE, TILE_KEYS

if TYPE_CHECKING:
    import numpy as np


class Mask(NamedTuple):
    """The predicate's options. BOUNDED: a query does not attend to all keys before it."""

    window: int
    num_sink_tokens: int
    CAUSAL: bool
    WINDOW: bool
    BOUNDED: bool

    def is_whole(self, last: int) -> bool:
        """Whether queries up to position `last` attend to all keys before them, and where not causal behind them."""
        return not self.BOUNDED or (self.CAUSAL and last < self.window)

    def attended_range(self, first: int, last: int, seq_len: int) -> tuple[int, int, int]:
        """Keys that queries at positions first to last attend to: [0, sink_end) and [begin, end), as these three."""
        begin, end = 0, min(seq_len, last + 1) if self.CAUSAL else seq_len
        if self.WINDOW:
            begin = max(0, first - self.window + 1)
            if not self.CAUSAL:
                end = min(end, last + self.window)
        end = max(0, end)
        begin = min(begin, end)
        return min(self.num_sink_tokens, begin), begin, end

    def max_tiles(self, queries: int) -> int:
        """How many tiles the last queries of a sequence attend to at most; any number where nothing bounds them."""
        if not self.BOUNDED:
            return 1 << 31
        # The first of the window's keys may be the last one of its tile.
        return -(-(self.window + queries - 2) // TILE_KEYS) + 1 + -(-self.num_sink_tokens // TILE_KEYS)

    def live(self, t: Any, positions: Any) -> Any:
        """Which keys at positions t queries attend to, arrays or tensors: `[queries, keys]`."""
        p = positions[:, None]
        live = t <= p if self.CAUSAL else (t == t) & (p == p)
        if self.WINDOW:
            live &= (t > p - self.window) | (t < self.num_sink_tokens)
            if not self.CAUSAL:
                live &= t < p + self.window
        return live

    def attended_tiles(self, positions: np.ndarray, seq_len: int, num_tiles: int, key_begin: int) -> np.ndarray:
        """Which tiles hold a key from key_begin on that queries at ascending positions may attend to."""
        import numpy as np  # which kernels do without

        keys = np.arange(num_tiles * TILE_KEYS)
        sink_end, begin, end = self.attended_range(int(positions[0]), int(positions[-1]), seq_len)
        live = (keys >= key_begin) & (keys < end) & ((keys < sink_end) | (keys >= begin))
        return np.asarray(live.reshape(num_tiles, TILE_KEYS).any(axis=1))


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
