"""The forward pass of a batch: block tables and slots of every layer group, built once a step, then the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ....cache import CacheManager, FullAttention, Group, SlidingWindow
from ....cache.allocation import Pairs
from ..paged.batch import PackedBatch, Pass
from ..paged.dispatch import no_mask
from ..paged.layers import BlockStorage, PagedCache
from ..support import UnsupportedError, eval_mode, harmless_tokens


class LayerGroups:
    """Which layers share a block table: those of full attention, and those of each window.

    Args:
        windows: Window of each layer that has one.
        num_layers: Layers of the model.
    """

    def __init__(self, windows: dict[int, int], num_layers: int) -> None:
        kinds = [windows.get(layer, 0) for layer in range(num_layers)]
        self.windows = sorted(set(kinds))
        self.of_layer = [self.windows.index(kind) for kind in kinds]

    def __len__(self) -> int:
        return len(self.windows)

    def specs(self) -> list[Group]:
        """What the manager is told of each group."""
        return [SlidingWindow(window) if window else FullAttention() for window in self.windows]


class GroupedStorage(BlockStorage):
    """Blocks of every layer, where layers of another group have blocks and copies of their own.

    Args:
        num_blocks: Blocks of each layer.
        block_size: Tokens of a block.
        windows: Window of each layer that has one.
        num_layers: Layers of the model.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: dict[int, int], num_layers: int) -> None:
        super().__init__(num_blocks, block_size, windows)
        self.num_layers = num_layers
        self.groups = LayerGroups(windows, num_layers)

    def copy_group(self, group: int, pairs: Pairs) -> None:
        """Copies whole blocks, source to target, in the layers of a group."""
        source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
        for layer, caches in self.layers.items():
            if self.groups.of_layer[layer] == group:
                for cache in caches:
                    torch.ops.pc.copy_blocks(cache, source.to(cache.device), target.to(cache.device))


class Row(NamedTuple):
    """Tokens of one request in a step: `length` of them, the first at position `start`.

    Attributes:
        key: The request in the manager.
        start: Tokens before these.
        length: How many; 0 for a request that waits to be forked.
        written: Tokens at the start of the request whose KV is in blocks already.
    """

    key: Any
    start: int
    length: int
    written: int


def passes(manager: CacheManager[Any, Any, Any], num_groups: int, rows: Sequence[Row]) -> list[PackedBatch]:
    """What the layers of each group share in a step; one without tokens has one of padding.

    Raises:
        RuntimeError: A token has no block.
    """
    size = manager.block_size
    counts = np.array([row.length for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    of_row = np.repeat(np.arange(len(rows)), counts)
    first = np.cumsum(counts) - counts
    positions = np.arange(counts.sum()) - np.repeat(first - starts, counts)
    known = positions < np.array([row.written for row in rows])[of_row]
    made = []
    for group in range(num_groups):
        found = [manager.block_table(row.key, group) for row in rows]
        tables = np.full((len(rows), max(1, *map(len, found))), -1, np.int32)
        for line, table in zip(tables, found, strict=True):
            line[: len(table)] = table
        blocks = tables[of_row, positions // size].astype(np.int64)
        if blocks.size and blocks.min() < 0:
            raise RuntimeError(f"request {rows[of_row[blocks.argmin()]].key}: a token of this step has no block")
        slots = np.where(known, -1, blocks * size + positions % size) if blocks.size else np.array([-1])
        made.append(PackedBatch(slots, tables, starts + counts, counts))
    return made


class GroupedCache(PagedCache):
    """The `past_key_values` of one pass whose layers have block tables by group."""

    def __init__(self, storage: GroupedStorage, batches: Sequence[Pass]) -> None:
        super().__init__(storage, batches[0])
        self._of_layer, self._batches = storage.groups.of_layer, batches

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values to the slots of the layer's group, see `PagedCache.update`."""
        self.batch = self._batches[self._of_layer[layer_idx]]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Step:
    """A model as transformers' runner calls it, over the blocks of one step.

    Args:
        model: The model.
        storage: Its blocks.
        manager: Whose tables say which.
        rows: The batch, in its order.
        copies: (group, block pairs) to be copied before anything is written.
    """

    def __init__(
        self,
        model: Any,
        storage: GroupedStorage,
        manager: CacheManager[Any, Any, Any],
        rows: Sequence[Row],
        copies: Sequence[tuple[int, Pairs]] = (),
    ) -> None:
        self._model, self._storage, self._copies = model, storage, copies
        self._cache = GroupedCache(storage, passes(manager, len(storage.groups), rows))

    def _supports_logits_to_keep(self) -> bool:
        return bool(self._model._supports_logits_to_keep())

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        """The model's output for a packed batch, `[1, num_tokens]` tokens and positions.

        Raises:
            UnsupportedError: A layer attended to something else than its blocks.
        """
        for group, pairs in self._copies:
            self._storage.copy_group(group, pairs)
        keep = {name: kwargs[name] for name in ("logits_to_keep",) if name in kwargs}
        output = self._model(
            input_ids=input_ids.long(),
            attention_mask=no_mask(input_ids.shape[1], input_ids.device, self._cache),
            position_ids=position_ids.long(),
            past_key_values=self._cache,
            use_cache=True,
            return_dict=True,
            **keep,
        )
        attended, layers = self._cache.layers_attended, len(self._storage.layers)
        if not attended == layers == self._storage.num_layers:
            raise UnsupportedError(f"{attended} of its {self._storage.num_layers} layers attended over blocks")
        return output


def allocate_layers(model: Any, storage: GroupedStorage) -> None:
    """Makes the blocks of every layer, so that sessions of several threads find them there.

    Raises:
        UnsupportedError: A layer has none.
    """
    row = PackedBatch(np.array([0]), np.zeros((1, 1), np.int32), np.array([1], np.int32), np.array([1], np.int32))
    cache = GroupedCache(storage, [row] * len(storage.groups))
    token = torch.from_numpy(harmless_tokens(model, 1)).to(model.device)[None]
    with eval_mode(model), torch.no_grad():
        model(
            input_ids=token,
            attention_mask=no_mask(1, token.device, cache),
            position_ids=torch.zeros_like(token),
            past_key_values=cache,
            use_cache=True,
        )
    if len(storage.layers) != storage.num_layers:
        raise UnsupportedError(f"{len(storage.layers)} of its {storage.num_layers} layers cache keys and values")
