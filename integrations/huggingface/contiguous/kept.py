"""Caches that calls have ended with: a later call goes on with one in place, and copies nothing from blocks."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import DynamicCache

from .continued import buffers_of
from .layers import GrowingWindowLayer, attention_layers, num_tokens, window_layers


@dataclass(frozen=True, eq=False)
class _Row:
    cache: DynamicCache
    tokens: np.ndarray
    keys: tuple[Any, ...]
    salt: Any
    buffers: list[tuple[int, int]]
    nbytes: int


class KeptRows:
    """The latest rows, each of one request; blocks alone say what of a prompt is cached.

    Args:
        max_bytes: Bytes of all rows together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._rows: list[_Row] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        with self._lock:
            return sum(row.nbytes for row in self._rows)

    def put(self, cache: DynamicCache, sequence: np.ndarray, keys: tuple[Any, ...], salt: Any) -> None:
        """Keeps the cache of a call that is over; those used longest ago go.

        Args:
            cache: Nobody else has it.
            sequence: Its tokens, and perhaps more.
            keys: What KV depends on besides tokens.
            salt: Whose blocks may be shared.
        """
        buffers = buffers_of(cache)
        layers = attention_layers(cache).values()
        if not buffers or any(layer.keys.requires_grad for layer in layers):
            return
        nbytes = sum(layer._keys_buffer.nbytes + layer._values_buffer.nbytes for layer in layers)
        row = _Row(cache, sequence[: num_tokens(cache)].copy(), keys, salt, buffers, nbytes)
        if nbytes <= self.max_bytes:
            with self._lock:
                rows, left = [row], self.max_bytes - nbytes
                for other in self._rows:
                    left -= other.nbytes
                    if left >= 0:
                        rows.append(other)
                self._rows = rows

    def take(self, tokens: np.ndarray, keys: tuple[Any, ...], salt: Any) -> DynamicCache | None:
        """A cache of these tokens alone, which is the caller's from now on; None where no row begins with them.

        Args:
            tokens: All of them cached in blocks.
            keys: What their KV depends on besides them.
            salt: Whose blocks may be shared.
        """
        with self._lock:
            found = next((row for row in self._rows if _begins(row, tokens, keys, salt)), None)
            if found is None:
                return None
            self._rows = [row for row in self._rows if row is not found]
        if buffers_of(found.cache) != found.buffers:  # a hook has kept it and written to it
            return None
        for layer in attention_layers(found.cache).values():
            first = (layer.first,) if isinstance(layer, GrowingWindowLayer) else ()
            layer.adopt(layer._keys_buffer, layer._values_buffer, len(tokens), *first)
        return found.cache


def _begins(row: _Row, tokens: np.ndarray, keys: tuple[Any, ...], salt: Any) -> bool:
    if any(layer.first > max(len(tokens) - layer.sliding_window + 1, 0) for layer in window_layers(row.cache)):
        return False  # it has forgotten what is to be read again
    same = type(row.salt) is type(salt) and (row.keys, row.salt) == (keys, salt)
    return same and np.array_equal(row.tokens[: len(tokens)], tokens)
