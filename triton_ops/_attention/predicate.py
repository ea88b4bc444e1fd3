"""Which keys a query attends to: the predicate's options, and what follows from them.

Kernels ask `kernels/predicate.py` for attended keys and tiles, the CPU and plans the methods of `Mask`;
nothing else knows an option but for BOUNDED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .layout import TILE_KEYS

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
