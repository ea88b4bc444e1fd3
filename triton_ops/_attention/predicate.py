"""The predicate: the options that decide which keys a query attends to, and the keys and tiles that follow from them.

Kernels use `kernels/predicate.py` to find attended keys and tiles. The CPU path and plans use the methods of `Mask`.
Only these two files compute with windows and sink tokens. Other files may ask whether a call is causal or BOUNDED.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .layout import TILE_KEYS


class Mask(NamedTuple):
    """The options of the predicate.

    The last three are constants of kernels. CAUSAL: a query ignores later keys. WINDOW: `window` is not 0. BOUNDED: a
    query need not attend to all keys before it, which is true only with a window.
    """

    window: int
    num_sink_tokens: int
    CAUSAL: bool
    WINDOW: bool
    BOUNDED: bool

    def is_whole(self, last: int) -> bool:
        """Return whether queries up to position `last` attend to all earlier keys (if not causal, later ones too)."""
        return not self.BOUNDED or (self.CAUSAL and last < self.window)

    def attended_range(self, first: int, last: int, seq_len: int) -> tuple[int, int, int]:
        """Return the keys to which queries at positions first to last attend: [0, sink_end) and [begin, end).

        The result is (sink_end, begin, end).
        """
        begin, end = 0, min(seq_len, last + 1) if self.CAUSAL else seq_len
        if self.WINDOW:
            begin = max(0, first - self.window + 1)
            if not self.CAUSAL:
                end = min(end, last + self.window)
        end = max(0, end)
        begin = min(begin, end)
        return min(self.num_sink_tokens, begin), begin, end

    def max_tiles(self, queries: int) -> int:
        """Return the most tiles to which a sequence's last `queries` queries attend; 2**31 if nothing bounds them."""
        if not self.BOUNDED:
            return 1 << 31
        # The first key of the window may be the last key of its tile.
        return -(-(self.window + queries - 2) // TILE_KEYS) + 1 + -(-self.num_sink_tokens // TILE_KEYS)

    def live(self, t: Any, positions: Any) -> Any:
        """Return whether each query attends to the keys at positions t, `[queries, keys]`, for arrays or tensors."""
        p = positions[:, None]
        live = t <= p if self.CAUSAL else (t == t) & (p == p)
        if self.WINDOW:
            live &= (t > p - self.window) | (t < self.num_sink_tokens)
            if not self.CAUSAL:
                live &= t < p + self.window
        return live
