"""What happens inside the model's layers: keys and values go into blocks, attention reads them from there.

Two hooks of transformers carry it: a `Cache` whose `update` writes blocks and marks the key tensor it gives back, and
the attention registry of `dispatch`, which sends a marked key to `PagedCache.attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..api import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from ..calls import UnsupportedError
from .batch import Pass
from .dispatch import MarkedCall, PagedPass, mark


@dataclass(frozen=True)
class LayerSpec:
    """Shape of one layer's keys and values."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of key and value of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedStorage:
    """Key and value blocks of every layer, `[num_blocks, block_size, num_kv_heads, head_dim]` each."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Mapping[int, int],
        group_of: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows  # of layers that attend over the last so many tokens only
        self.group_of = group_of  # the manager's group whose block table a layer has; others have the first one's
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.specs: dict[int, LayerSpec] = {}

    def allocate(self, layer_idx: int, spec: LayerSpec) -> None:
        """Takes the memory of a layer's blocks."""
        shape = (self.num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
        # Tensors made in inference mode could not be written to outside it, and the blocks outlive a call.
        with torch.inference_mode(False):
            keys, values = (torch.empty(shape, dtype=spec.dtype, device=spec.device) for _ in range(2))
        self.layers[layer_idx], self.specs[layer_idx] = (keys, values), spec

    def layer(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's blocks, allocated at its first keys `[1, num_kv_heads, num_tokens, head_dim]`."""
        # UnsupportedError: keys and values differ in shape, or the layer changed its shape.
        spec = LayerSpec(key.shape[1], key.shape[3], key.dtype, key.device)
        known = self.specs.get(layer_idx)
        if known is None:
            if value.shape != key.shape or value.dtype != key.dtype:
                raise UnsupportedError(
                    f"layer {layer_idx} has keys {list(key.shape)} and values {list(value.shape)}, which must be alike"
                )
            self.allocate(layer_idx, spec)
        elif known != spec:
            raise UnsupportedError(f"layer {layer_idx} changed from {known} to {spec}")
        return self.layers[layer_idx]

    def copy(self, pairs: Sequence[tuple[int, int]], group: int = 0) -> None:
        """Copies whole blocks, source to target, in the layers of a group."""
        if not pairs:
            return
        source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
        for layer, caches in self.layers.items():
            if self.group_of.get(layer, 0) == group:
                for cache in caches:
                    torch.ops.pc.copy_blocks(cache, source.to(cache.device), target.to(cache.device))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * sum(spec.bytes_per_token for spec in self.specs.values())


def layer_windows(config: Any) -> dict[int, int]:
    """The windows of layers, as transformers would cache them; UnsupportedError: one is neither full nor sliding."""
    text = config.get_text_config(decoder=True)
    other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise UnsupportedError(f"it has layers of {', '.join(sorted(other))}")
    windows = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows[index] = layer.sliding_window
        elif type(layer) is not DynamicLayer:
            raise UnsupportedError(f"layer {index} keeps a {type(layer).__name__}")
    return windows


class PagedCache(PagedPass, Cache):  # type: ignore[misc]  # transformers is untyped here
    """The `past_key_values` of one packed pass: writes blocks, and hands a group's pass to the attention function."""

    def __init__(self, storage: PagedStorage, *batches: Pass) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.storage = storage
        self.batches, self.batch = batches, batches[0]
        self.layers_attended = 0
        self._written: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always given, rows of a packed batch have no common length."""
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values `[1, num_kv_heads, num_tokens, head_dim]` to their slots and gives them back."""
        key_cache, value_cache = self.storage.layer(layer_idx, key_states, value_states)
        self.batch = self.batches[self.storage.group_of.get(layer_idx, 0)]
        slot_mapping = self.batch.on(key_states.device).slot_mapping
        torch.ops.pc.reshape_and_cache(
            key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), key_cache, value_cache, slot_mapping
        )
        self._written = (key_states, value_states, key_cache, value_cache, layer_idx)
        return mark(key_states, self), value_states

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """Attention of a packed row over the blocks just written."""
        # Layers that share keys attend to others than `update` saw: UnsupportedError.
        if self._written is None or self._written[0] is not call.key or self._written[1] is not call.value:
            return super().attend(call)
        query, window = call.query, call.window
        _, _, key_cache, value_cache, layer_idx = self._written
        self._written = None
        self.layers_attended += 1
        if window != self.storage.windows.get(layer_idx):
            raise UnsupportedError(
                f"layer {layer_idx} attends over a window of {window} and caches {self.storage.windows.get(layer_idx)}"
            )
        _, block_tables, seq_lens, query_start_loc = self.batch.on(query.device)
        batch = (query[0].transpose(0, 1), key_cache, value_cache, block_tables, seq_lens, query_start_loc, call.scale)
        block_size, num_kv_heads = key_cache.shape[1:3]
        options = {
            "softcap": call.softcap,
            "sinks": call.sinks,
            "max_query_len": self.batch.max_query_len,
            "max_seq_len": self.batch.max_seq_len,
            "plan": self.batch.plan(query.device, block_size, window or 0, num_kv_heads),
        }
        out: torch.Tensor
        if window is None:
            out = torch.ops.pc.paged_attention(*batch, **options)
        else:
            out = torch.ops.pc.sliding_window_attention(*batch, window, **options)
        return out.unsqueeze(0)
