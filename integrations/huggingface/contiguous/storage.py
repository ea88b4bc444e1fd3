"""What the groups of a manager hold: keys and values of the layers that share a block table, or recurrent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange

from ....cache import FullAttention, Group, Recurrent, SlidingWindow
from ..settings import CacheOptions, default_num_blocks, memory_budget
from .layers import States

CHUNK = 1024  # tokens that are computed, and written to blocks, at a time where layers have windows
SIDES = ("keys", "values")

Content = dict[str, torch.Tensor]  # what one block holds: "3 keys", "3 values" of a layer, or as `States` have it


class TokenSpec(NamedTuple):
    """What one layer keeps of a token as its keys, or as its values."""

    num_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, rows: int, tokens: int) -> torch.Tensor:
        """`[rows, num_heads, tokens, width]`, not filled."""
        return torch.empty(rows, self.num_heads, tokens, self.width, dtype=self.dtype, device=self.device)


Specs = dict[int, tuple[TokenSpec, TokenSpec]]  # of each attention layer its keys and its values


class TensorSpec(NamedTuple):
    """What a tensor is of one block."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class BlockTensors:
    """Tensors by name with a row for each block; memory is taken when one is first used."""

    def __init__(self, num_blocks: int, specs: Mapping[str, TensorSpec]) -> None:
        self.num_blocks = num_blocks
        self._specs = specs
        self.tensors: dict[str, torch.Tensor] = {}  # those that were used, [num_blocks, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all tensors."""
        return sum(prod(spec.shape) * spec.dtype.itemsize for spec in self._specs.values())

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of a block's content."""
        return {name: (spec.shape, spec.dtype) for name, spec in self._specs.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        found = self.tensors.get(name)
        if found is None:
            spec = self._specs[name]
            with torch.inference_mode(False):  # else it could not be written to outside of it
                made = torch.empty(self.num_blocks, *spec.shape, dtype=spec.dtype, device=spec.device)
            found = self.tensors.setdefault(name, made)  # another thread may have been first
        return found

    def content(self, block: int) -> Content:
        """Views of what a block has, which tiers copy."""
        return {name: tensor[block] for name, tensor in self.tensors.items()}

    def put(self, block: int, content: Content) -> None:
        """Fills a block with what `content` gave."""
        for name in self._specs:
            self.tensor(name)[block].copy_(content[name])


class BlockIds:
    """Blocks that are read or written, `[n]` with n at least 1, looked at once for all layers."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.count = len(blocks)
        first, last = int(blocks[0]), int(blocks[-1])
        alike = last - first + 1 == self.count and bool((np.diff(blocks) == 1).all())
        self.run = slice(first, last + 1) if alike else None
        self.index = torch.from_numpy(blocks.astype(np.int64))


class KVStorage(BlockTensors):
    """Keys and values, each `[num_blocks, num_heads, block_size, width]`; layers and both sides may differ in shape."""

    def __init__(self, num_blocks: int, block_size: int, specs: Specs) -> None:
        self.block_size = block_size
        self.specs = specs
        shapes = {
            f"{index} {side}": TensorSpec((s.num_heads, block_size, s.width), s.dtype, s.device)
            for index, pair in specs.items()
            for side, s in zip(SIDES, pair, strict=True)
        }
        super().__init__(num_blocks, shapes)

    def write(self, index: int, blocks: BlockIds, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes whole blocks of a layer: `[num_heads, blocks.count * block_size, width]`, each of its own width."""
        for side, new in zip(SIDES, (keys, values), strict=True):
            cache = self.tensor(f"{index} {side}")
            source = rearrange(new, "heads (block slot) width -> block heads slot width", slot=self.block_size)
            if blocks.run is not None:
                cache[blocks.run].copy_(source)
            else:
                cache.index_copy_(0, blocks.index.to(cache.device), source)

    def read(self, index: int, blocks: BlockIds, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Reads the first tokens of a layer's blocks into `keys` and `values`, `[num_heads, num_tokens, width]`."""
        for side, out in zip(SIDES, (keys, values), strict=True):
            cache = self.tensor(f"{index} {side}")
            found = cache[blocks.run] if blocks.run else cache.index_select(0, blocks.index.to(cache.device))
            whole = out.shape[1] // self.block_size
            head = out[:, : whole * self.block_size].view(out.shape[0], whole, self.block_size, out.shape[2])
            head.copy_(rearrange(found[:whole], "block heads slot width -> heads block slot width"))
            if whole < blocks.count:
                out[:, whole * self.block_size :] = found[whole, :, : out.shape[1] - whole * self.block_size]


class StateStorage(BlockTensors):
    """Checkpoints of recurrent (SSM) and convolution states, of a row each, like those of `states`."""

    def __init__(self, num_blocks: int, states: States) -> None:
        super().__init__(num_blocks, {n: TensorSpec(tuple(s.shape[1:]), s.dtype, s.device) for n, s in states.items()})

    def write(self, block: int, states: States) -> None:
        """Fills a block with the states of a row."""
        self.put(block, {name: state[0] for name, state in states.items()})

    def read(self, block: int) -> States:
        """The states of a block, which are the storage's own: `put_states` copies them."""
        return {name: self.tensor(name)[block : block + 1] for name in self._specs}

    def of(self, content: Content) -> States:
        """The states of a row from what `content` gave."""
        return {name: content[name][None].to(spec.device) for name, spec in self._specs.items()}


class ModelStorage:
    """The storage of each group of a manager: what each of `parts` holds for one of `groups`."""

    def __init__(self, groups: Sequence[Group], parts: Sequence[KVStorage | StateStorage], block_size: int) -> None:
        self.groups, self.parts, self.block_size = tuple(groups), tuple(parts), block_size
        self.kv = [(group, part) for group, part in enumerate(parts) if isinstance(part, KVStorage)]
        self.specs: Specs = {layer: specs for _, part in self.kv for layer, specs in part.specs.items()}
        # Whether a hit of any whole blocks will do: there are neither windows nor states.
        self.simple = len(groups) == 1 and isinstance(groups[0], FullAttention)
        # Checkpoints of recurrent states, and the number of their group; None and -1 without.
        self.state_group = next((g for g, part in enumerate(parts) if isinstance(part, StateStorage)), -1)
        self.states = next((part for part in parts if isinstance(part, StateStorage)), None)
        room = [
            part.num_blocks - spec.needed(spec.window, -(-spec.window // block_size), block_size).size
            for spec, part in zip(groups, parts, strict=True)
            if isinstance(spec, SlidingWindow)
        ]
        self.evicts = False  # whether something was seen to take tokens from a cache, as hooks that evict do
        # Blocks that are written between two commits, so that a window's are used again; None: all at once.
        self.chunk = max(1, min(CHUNK // block_size, min(room) // 2)) if room else None


def model_storage(
    model: Any, options: CacheOptions, specs: Specs, windows: Mapping[int, int], states: States
) -> ModelStorage:
    """Memory for keys and values by window, and for a row's states in a quarter of the default memory at most."""
    by_window: dict[int, Specs] = {}
    for layer, pair in specs.items():
        by_window.setdefault(windows.get(layer, 0), {})[layer] = pair
    size, own = options.block_size, options.window_blocks
    held = [(window, KVStorage(0, size, layers)) for window, layers in sorted(by_window.items() or [(0, {})])]
    sizes = [part.bytes_per_block for window, part in held if not (window and own)]
    taken = sum((own or 0) * part.bytes_per_block for window, part in held if window)
    num_blocks = options.num_blocks or default_num_blocks(model, sum(sizes), size, taken)
    groups: list[Group] = []
    parts: list[KVStorage | StateStorage] = []
    for window, part in held:
        part.num_blocks = count = (own or num_blocks) if window else num_blocks
        groups.append(SlidingWindow(window=window, num_blocks=count) if window else FullAttention(num_blocks=count))
        parts.append(part)
    if states:
        checkpoints = StateStorage(0, states)
        fitting = memory_budget(model) // 4 // max(checkpoints.bytes_per_block, 1)
        checkpoints.num_blocks = max(1, min(num_blocks, fitting))
        groups.append(Recurrent(num_blocks=checkpoints.num_blocks))
        parts.append(checkpoints)
    return ModelStorage(groups, parts, size)
