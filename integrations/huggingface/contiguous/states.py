"""States of recurrent and convolution layers at block boundaries: whoever begins behind one goes on from it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from transformers import DynamicCache

from .layers import state_layers
from .storage import Content, Shapes

Key = tuple[int, str, int]
"""Layer, "conv" or "recurrent", index within the layer."""

States = list[tuple[int, str, int, torch.Tensor]]
"""Of one row: the parts of a `Key`, and the state, `[1, ...]`."""


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


@dataclass(frozen=True)
class StateSpec:
    """What a state is of one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class StateStorage:
    """States of all layers by block of a recurrent group; memory is taken when the first is written.

    Args:
        num_blocks: States of each layer.
        like: States of a row.
    """

    def __init__(self, num_blocks: int, like: States) -> None:
        self.num_blocks = num_blocks
        self.specs = {
            (at, kind, index): StateSpec(tuple(state.shape[1:]), state.dtype, state.device)
            for at, kind, index, state in like
        }
        self.rows: dict[Key, torch.Tensor] = {}

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the states of one row."""
        return sum(prod(spec.shape) * spec.dtype.itemsize for spec in self.specs.values())

    @property
    def shapes(self) -> Shapes:
        """Of the content of a block."""
        return {_name(key): (spec.shape, spec.dtype) for key, spec in self.specs.items()}

    def _row(self, key: Key) -> torch.Tensor:
        found = self.rows.get(key)
        if found is None:
            spec = self.specs[key]
            with torch.inference_mode(False):  # else nobody could write to them outside of it
                rows = torch.empty(self.num_blocks, *spec.shape, dtype=spec.dtype, device=spec.device)
            found = self.rows.setdefault(key, rows)
        return found

    def write(self, block: int, states: States) -> None:
        """Fills a block with the states of a row."""
        for at, kind, index, state in states:
            self._row((at, kind, index))[block].copy_(state[0])

    def read(self, block: int) -> States:
        """The states of a block, which are the storage's own: `put_states` copies them."""
        return [(*key, self._row(key)[block : block + 1]) for key in self.specs]

    def of(self, content: Content) -> States:
        """The states of a row from what `content` gave."""
        return [(*key, content[_name(key)][None].to(spec.device)) for key, spec in self.specs.items()]

    def content(self, block: int) -> Content:
        """Copies of a block's states in host memory."""
        return {_name(key): self._row(key)[block].to("cpu", copy=True) for key in self.specs}

    def put(self, block: int, content: Content) -> None:
        """Fills a block with what `content` gave."""
        for key in self.specs:
            self._row(key)[block].copy_(content[_name(key)])


def _name(key: Key) -> str:
    return " ".join(map(str, key))
