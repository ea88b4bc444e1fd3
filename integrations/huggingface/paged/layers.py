"""What happens inside the model's layers: keys and values go into blocks, attention reads them from there.

Two hooks of transformers carry it: a `Cache` whose `update` writes blocks and marks the key tensor it gives back, and
the attention registry of `dispatch`, which sends a marked key to `PagedCache.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..support import UnsupportedError
from .batch import Pass
from .dispatch import mark


@dataclass(frozen=True)
class LayerSpec:
    """Shape of one layer's keys and values."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def bytes_per_token(self) -> int:
        """Bytes of key and value of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class BlockStorage:
    """Key and value blocks of every layer, `[num_blocks, block_size, num_kv_heads, head_dim]` each.

    Args:
        num_blocks: Blocks of each layer.
        block_size: Tokens of a block.
        windows: Layers that attend over the last so many tokens only.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: dict[int, int]) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.specs: dict[int, LayerSpec] = {}

    def layer(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of a layer, allocated when it first shows its shape.

        Args:
            layer_idx: Which layer.
            key: `[1, num_kv_heads, num_tokens, head_dim]`.
            value: Like `key`.

        Raises:
            UnsupportedError: Keys and values differ in shape, or the layer changed its shape.
        """
        spec = LayerSpec(key.shape[1], key.shape[3], key.dtype, key.device)
        known = self.specs.get(layer_idx)
        if known is None:
            if value.shape != key.shape or value.dtype != key.dtype:
                raise UnsupportedError(
                    f"layer {layer_idx} has keys {list(key.shape)} and values {list(value.shape)}, which must be alike"
                )
            shape = (self.num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
            # Tensors made in inference mode could not be written to outside it, and the blocks outlive this call.
            with torch.inference_mode(False):
                self.layers[layer_idx] = (key.new_empty(shape), key.new_empty(shape))
            self.specs[layer_idx] = spec
        elif known != spec:
            raise UnsupportedError(f"layer {layer_idx} changed from {known} to {spec}")
        return self.layers[layer_idx]

    def fresh(self) -> BlockStorage:
        """Blocks of the same layers without content."""
        return BlockStorage(self.num_blocks, self.block_size, self.windows)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, source to target, in every layer."""
        if not pairs:
            return
        source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
        for key_cache, value_cache in self.layers.values():
            for cache in (key_cache, value_cache):
                torch.ops.pc.copy_blocks(cache, source.to(cache.device), target.to(cache.device))

    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * sum(spec.bytes_per_token() for spec in self.specs.values())


def layer_windows(config: Any) -> dict[int, int]:
    """The layers with a sliding window, and its tokens: what transformers itself would cache for each layer.

    Raises:
        UnsupportedError: A layer is neither full attention nor a sliding window.
    """
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


class PagedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The `past_key_values` of one packed forward pass: writes blocks, and hands the pass to the attention function."""

    def __init__(self, storage: BlockStorage, batch: Pass) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.storage = storage
        self.batch = batch
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
        slot_mapping = self.batch.on(key_states.device).slot_mapping
        torch.ops.pc.reshape_and_cache(
            key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), key_cache, value_cache, slot_mapping
        )
        self._written = (key_states, value_states, key_cache, value_cache, layer_idx)
        return mark(key_states, self), value_states

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of `query [1, num_heads, num_tokens, head_dim]` over the blocks just written.

        Returns:
            `[1, num_tokens, num_heads, head_dim]`.

        Raises:
            UnsupportedError: The keys are not those that `update` saw, as in models whose layers share them.
        """
        if self._written is None or self._written[0] is not key or self._written[1] is not value:
            raise UnsupportedError("a layer attends to keys other than those it has just cached")
        _, _, key_cache, value_cache, layer_idx = self._written
        self._written = None
        self.layers_attended += 1
        if window != self.storage.windows.get(layer_idx):
            raise UnsupportedError(
                f"layer {layer_idx} attends over a window of {window} and caches {self.storage.windows.get(layer_idx)}"
            )
        _, block_tables, seq_lens, query_start_loc = self.batch.on(query.device)
        batch = (query[0].transpose(0, 1), key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale)
        block_size, num_kv_heads = key_cache.shape[1:3]
        options = {
            "softcap": softcap,
            "sinks": sinks,
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

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers' layers call: `AttentionInterface`'s signature over `attend`."""
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        refused = {
            "attention that is not causal": not causal,
            "dropout": bool(dropout),
            "a position bias": position_bias is not None,
        }
        for what, present in refused.items():
            if present:
                raise UnsupportedError(f"its attention uses {what}")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.attend(query, key, value, scale, sliding_window, softcap or 0.0, s_aux), None
