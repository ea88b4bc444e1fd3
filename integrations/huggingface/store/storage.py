"""The memory of a manager's groups: keys and values of layers that share a block table, or recurrent states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from einops import rearrange

from ....cache import Allocation, CacheManager, FullAttention, Group, Recurrent, SlidingWindow
from ....triton_ops import copy_blocks, move_slots
from ..layers import States
from ..settings import CacheOptions, default_num_blocks, memory_budget

CHUNK = 1024  # tokens computed between two writes to blocks, if layers have windows
SIDES = ("keys", "values")

BlockContent = dict[str, torch.Tensor]  # one block: "3 keys", "3 values" of layer 3, or `States`


class TensorSpec(NamedTuple):
    """The shape of a tensor for one token or one block, its dtype and its device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


Specs = dict[int, tuple[TensorSpec, TensorSpec]]
"""By attention layer: the keys and the values that it stores per token, each of shape `(num_heads, width)`."""


Rotation = tuple[torch.Tensor | None, bool, int]
"""The rotation that makes rows of a layer depend on their position: `inv_freq, is_neox, first` of `pc.move_slots`."""

Rotations = tuple[Rotation, Rotation]
"""The rotations of a layer's keys and values. Latent attention stores its rotated part as values."""

AnyManager: TypeAlias = CacheManager[Any, Any, Any]  # of one group or of several


class BlockTensors:
    """Named tensors with one row for each block. A tensor is allocated on first use.

    Checkpoints of recurrent (SSM) and convolution states are such tensors. A block holds the states of one row.
    """

    def __init__(self, num_blocks: int, specs: Mapping[str, TensorSpec]) -> None:
        self.num_blocks = num_blocks
        self._specs = specs
        self.tensors: dict[str, torch.Tensor] = {}  # allocated so far, [num_blocks, ...]

    @property
    def bytes_per_block(self) -> int:
        """The bytes of one block over all tensors."""
        return sum(prod(spec.shape) * spec.dtype.itemsize for spec in self._specs.values())

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor of a block's content."""
        return {name: (spec.shape, spec.dtype) for name, spec in self._specs.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor with this name, allocated if needed."""
        found = self.tensors.get(name)
        if found is None:
            spec = self._specs[name]
            with torch.inference_mode(False):  # an inference tensor cannot be written outside inference mode
                made = torch.empty(self.num_blocks, *spec.shape, dtype=spec.dtype, device=spec.device)
            found = self.tensors.setdefault(name, made)  # another thread may have allocated it first
        return found

    def content(self, block: int) -> BlockContent:
        """Return views of a block's content, which tiers copy."""
        return {name: tensor[block] for name, tensor in self.tensors.items()}

    def put(self, block: int, content: BlockContent) -> None:
        """Fill a block with what `content` returned."""
        for name in self._specs:
            self.tensor(name)[block].copy_(content[name])

    def states_of(self, content: BlockContent) -> States:
        """Return the recurrent states of a row, `[1, ...]`, from a block's content, on their devices."""
        return {name: content[name][None].to(spec.device) for name, spec in self._specs.items()}


BlockIndex = slice | torch.Tensor


def block_index(blocks: np.ndarray) -> BlockIndex:
    """Return an index for `read` and `write` of one or more blocks: a slice if they are consecutive."""
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first + 1 == len(blocks) and bool((np.diff(blocks) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(blocks.astype(np.int64))


class KVStorage(BlockTensors):
    """Keys and values of layers, `[num_blocks, num_heads, block_size, width]`. Shapes may differ between layers."""

    def __init__(self, num_blocks: int, block_size: int, specs: Specs) -> None:
        self.block_size = block_size
        self.specs = specs
        shapes = {
            f"{index} {side}": TensorSpec((spec.shape[0], block_size, spec.shape[1]), spec.dtype, spec.device)
            for index, pair in specs.items()
            for side, spec in zip(SIDES, pair, strict=True)
        }
        super().__init__(num_blocks, shapes)

    def write(self, layer: int, blocks: BlockIndex, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer's keys and values, each `[num_heads, num_tokens, width]`, to whole blocks."""
        for side, new in zip(SIDES, (keys, values), strict=True):
            cache = self.tensor(f"{layer} {side}")
            source = rearrange(new, "heads (block slot) width -> block heads slot width", slot=self.block_size)
            if isinstance(blocks, slice):
                cache[blocks].copy_(source)
            else:
                cache.index_copy_(0, blocks.to(cache.device), source)

    def read(self, layer: int, blocks: BlockIndex, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Read the first tokens of a layer's blocks into `keys` and `values`, `[num_heads, num_tokens, width]`."""
        for side, out in zip(SIDES, (keys, values), strict=True):
            cache = self.tensor(f"{layer} {side}")
            found = cache[blocks] if isinstance(blocks, slice) else cache.index_select(0, blocks.to(cache.device))
            whole = out.shape[1] // self.block_size
            head = out[:, : whole * self.block_size].view(out.shape[0], whole, self.block_size, out.shape[2])
            head.copy_(rearrange(found[:whole], "block heads slot width -> heads block slot width"))
            if whole < len(found):
                out[:, whole * self.block_size :] = found[whole, :, : out.shape[1] - whole * self.block_size]


class ModelStorage:
    """The storage of all groups of a manager. `parts` are in the order of `groups`."""

    def __init__(self, groups: Sequence[Group], parts: Sequence[BlockTensors], block_size: int) -> None:
        self.groups, self.parts, self.block_size = tuple(groups), tuple(parts), block_size
        self.kv = [(group, part) for group, part in enumerate(parts) if isinstance(part, KVStorage)]
        self.specs: Specs = {layer: specs for _, part in self.kv for layer, specs in part.specs.items()}
        self.group_of = {layer: group for group, part in self.kv for layer in part.specs}
        windows = {g: spec.window for g, spec in enumerate(self.groups) if isinstance(spec, SlidingWindow)}
        self.windows = {layer: windows[group] for layer, group in self.group_of.items() if group in windows}
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Whether a prompt can continue from any cached prefix, because there are neither windows nor states.
        self.any_prefix = len(groups) == 1 and isinstance(groups[0], FullAttention)
        # The group and storage of recurrent states; -1 and None if the model has none.
        self.state_group = next((g for g, group in enumerate(groups) if isinstance(group, Recurrent)), -1)
        self.states = parts[self.state_group] if self.state_group >= 0 else None
        room = [
            part.num_blocks - spec.needed(spec.window, -(-spec.window // block_size), block_size).size
            for spec, part in zip(groups, parts, strict=True)
            if isinstance(spec, SlidingWindow)
        ]
        self.evicts = False  # whether a hook was seen to remove tokens from a cache
        # Blocks to write between two commits, each of which frees blocks behind a window. None: no windows.
        self.chunk = max(1, min(CHUNK // block_size, min(room) // 2)) if room else None

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values as views for operators, `[num_blocks, block_size, num_heads, width]`."""
        found = self._caches.get(layer)
        if found is None:
            part = self.parts[self.group_of[layer]]
            keys, values = (part.tensor(f"{layer} {side}").transpose(1, 2) for side in SIDES)
            found = self._caches[layer] = keys, values
        return found

    def copy(self, pairs: Iterable[tuple[int, int]], group: int = 0) -> None:
        """Copy whole blocks of a group. A pair is the number of the source and that of the target."""
        ids = torch.tensor(list(pairs), dtype=torch.int64).view(-1, 2)
        for cache in self.parts[group].tensors.values() if len(ids) else ():
            copy_blocks(cache, ids[:, 0].to(cache.device), ids[:, 1].to(cache.device))

    def move(self, allocation: Allocation, rotations: Mapping[int, Rotations]) -> None:
        """Copy an allocation's moved text from other positions into its blocks, with rotated keys."""
        spans = allocation.moved
        sources = torch.from_numpy(np.concatenate([span.slots for span in spans]))
        targets = torch.from_numpy(np.concatenate([span.targets for span in spans]))
        deltas = torch.from_numpy(np.concatenate([np.full(span.end - span.start, span.delta) for span in spans]))
        self.copy(allocation.copies)
        for layer in self.specs:
            (keys, values), (of_keys, of_values) = self.caches(layer), rotations[layer]
            together = of_values[0] is None  # values are not rotated
            move_slots(keys, values if together else None, sources, targets, deltas, *of_keys)
            if not together:
                move_slots(values, None, sources, targets, deltas, *of_values)

    @property
    def bytes_per_block(self) -> int:
        """The bytes of one block of keys and values over all layers."""
        return sum(part.bytes_per_block for _, part in self.kv)


def model_storage(
    model: Any, options: CacheOptions, specs: Specs, windows: Mapping[int, int], states: States
) -> ModelStorage:
    """Return storage with a group for full attention, one for each window and one for states, as the model needs.

    States get at most a quarter of the memory budget.
    """
    by_window: dict[int, Specs] = {}
    for layer, pair in specs.items():
        by_window.setdefault(windows.get(layer, 0), {})[layer] = pair
    size, own = options.block_size, options.window_blocks
    held = [(window, KVStorage(0, size, layers)) for window, layers in sorted(by_window.items() or [(0, {})])]
    sizes = [part.bytes_per_block for window, part in held if not (window and own)]
    taken = sum((own or 0) * part.bytes_per_block for window, part in held if window)
    num_blocks = options.num_blocks or default_num_blocks(model, sum(sizes), size, taken)
    groups: list[Group] = []
    parts: list[BlockTensors] = []
    for window, part in held:
        part.num_blocks = count = (own or num_blocks) if window else num_blocks
        groups.append(SlidingWindow(window=window, num_blocks=count) if window else FullAttention(num_blocks=count))
        parts.append(part)
    if states:
        specs_of_states = {name: TensorSpec(tuple(s.shape[1:]), s.dtype, s.device) for name, s in states.items()}
        checkpoints = BlockTensors(0, specs_of_states)
        fitting = memory_budget(model) // 4 // max(checkpoints.bytes_per_block, 1)
        checkpoints.num_blocks = max(1, min(num_blocks, fitting))
        groups.append(Recurrent(num_blocks=checkpoints.num_blocks))
        parts.append(checkpoints)
    return ModelStorage(groups, parts, size)
