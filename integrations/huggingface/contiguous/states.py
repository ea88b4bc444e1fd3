"""States of recurrent and convolution layers at block boundaries: whoever begins behind one goes on from it."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from transformers import DynamicCache

from .layers import state_layers

States = list[tuple[int, str, int, torch.Tensor]]
"""(layer, "conv" or "recurrent", index within the layer, `[1, ...]`) of one row."""


def take_states(cache: DynamicCache, row: int) -> States:
    """Copies of a row's states: layers change theirs in place."""
    return [
        (at, kind, index, state[row : row + 1].clone())
        for at, layer in state_layers(cache).items()
        for kind in ("conv", "recurrent")
        for index, state in getattr(layer, f"{kind}_states").items()
        if state is not None
    ]


def put_states(cache: DynamicCache, rows: list[States]) -> None:
    """Gives the layers of an empty cache the states of its rows."""
    for parts in zip(*rows, strict=True):
        at, kind, index, _ = parts[0]
        layer = cache.layers[at]
        getattr(layer, f"update_{kind}_state")(torch.cat([part[3] for part in parts]), index)
        layer.has_previous_state[index] = True


class StateStore:
    """States by the hash of the block that ends where they were taken; the one used longest ago goes first.

    Args:
        max_bytes: Bytes of all states together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._states: OrderedDict[bytes, States] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._states

    def items(self) -> list[tuple[bytes, States]]:
        """All states with their hashes."""
        with self._lock:
            return list(self._states.items())

    def get(self, digest: bytes) -> States | None:
        """The states taken behind a block; nobody writes to them."""
        with self._lock:
            states = self._states.get(digest)
            if states is not None:
                self._states.move_to_end(digest)
            return states

    def put(self, digest: bytes, states: States) -> None:
        """Keeps states; what has no room is dropped."""
        size = _nbytes(states)
        with self._lock:
            if digest in self._states or size > self.max_bytes:
                return
            self._states[digest] = states
            self.nbytes += size
            while self.nbytes > self.max_bytes:
                _, oldest = self._states.popitem(last=False)
                self.nbytes -= _nbytes(oldest)


def _nbytes(states: States) -> int:
    return sum(state.nbytes for *_, state in states)
