"""Layers of a cache that keep every token in buffers with room to grow, and give the model what its own layers give."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..support import UnsupportedError


class _Growing:
    """Keys and values as views of buffers into which new tokens are written, in place of a concatenation a step."""

    keys: Any
    values: Any
    room = 64
    """Tokens of room that a new buffer gets, or half of what it holds where that is more."""

    def _extend(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """Puts `new [batch, heads, tokens, width]` behind what is there, in a new buffer where `keys` was replaced."""
        own = self.__dict__
        there: Any = own.get(name)
        buffer: Any = own.get(f"_{name}_buffer")
        batch, heads, tokens, width = new.shape
        length = there.shape[2] if there is not None and there.dim() == 4 else 0
        end = length + tokens
        if (
            buffer is None
            or there is None
            or there.data_ptr() != buffer.data_ptr()
            or batch != buffer.shape[0]
            or end > buffer.shape[2]
        ):
            buffer = new.new_empty((batch, heads, end + max(self.room, end // 2 if length else 0), width))
            if length:
                buffer.narrow(2, 0, length).copy_(there)
            own[f"_{name}_buffer"] = buffer
        buffer.narrow(2, length, tokens).copy_(new)
        grown: torch.Tensor = buffer.narrow(2, 0, end)
        own[name] = grown
        return grown

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Takes buffers `[batch, heads, capacity, width]` whose first `length` tokens are filled."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._keys_buffer, self._values_buffer = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]


class GrowingLayer(_Growing, DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer of full attention."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """All keys and values, the new ones last."""
        keys, values = self._extend("keys", key_states), self._extend("values", value_states)
        if not self.is_initialized:  # without the empty tensors of `lazy_initialization`
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return keys, values


class GrowingIndexedLayer(GrowingLayer, DynamicIndexedLayer):  # type: ignore[misc]
    """A layer of sparse attention, whose indexer has a key of its own for each token.

    Attributes:
        index: These keys as those of one head, with values of no width.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = GrowingLayer()

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """All keys of the indexer, `[batch, tokens, width]`, the new ones last."""
        states = indexer_key_states[:, None]
        keys, _ = self.index.update(states, states[..., :0])
        all_keys: torch.Tensor = keys[:, 0]
        return all_keys

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens."""
        super().crop(tokens_to_remove)
        self.index.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Gives each row what another had."""
        super().reorder_cache(beam_idx)
        self.index.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        super().batch_repeat_interleave(repeats)
        self.index.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Leaves these rows."""
        super().batch_select_indices(indices)
        self.index.batch_select_indices(indices)

    def reset(self) -> None:
        """Forgets all tokens."""
        super().reset()
        self.index.reset()


class GrowingWindowLayer(_Growing, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer of sliding-window or chunked attention: it gives what is in the window, and keeps what blocks lack.

    Attributes:
        first: Column of the first key that is there.
        released: Columns before it are in blocks, or go to none: they may be forgotten behind the window.
    """

    first = released = 0
    slack = 1024
    """Tokens behind the window that are kept all the same: a later call may go on from there in place."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """The keys and values that transformers' own layer would give."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._forget(key_states.shape[2])
        self.cumulative_length += key_states.shape[2]
        visible = self.sliding_window - 1 + key_states.shape[2]
        keys, values = self._extend("keys", key_states), self._extend("values", value_states)
        return keys[:, :, -visible:], values[:, :, -visible:]

    def _forget(self, new: int) -> None:
        """Leaves out what nobody asks for, where a buffer is full or mostly that; `_extend` then makes another."""
        unread = min(self.released, self.cumulative_length - self.sliding_window + 1) - self.first
        if unread <= self.slack or self.record_past:
            return
        buffer, there = self.__dict__.get("_keys_buffer"), self.keys.shape[2]
        if buffer is None or there + new > buffer.shape[2] or unread > there - unread + new + self.room:
            self.keys, self.values = self.keys[:, :, unread:], self.values[:, :, unread:]
            self.first += unread

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0) -> None:
        """See `GrowingLayer`; of `length` columns the buffers have those from `first` on."""
        super().adopt(keys, values, length - first)
        self.cumulative_length, self.first, self.released = length, first, first

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens.

        Raises:
            RuntimeError: The window before what would be the last token is not there any more.
        """
        left = self.cumulative_length - abs(tokens_to_remove)
        if tokens_to_remove and left - self.sliding_window + 1 < self.first > 0:
            raise RuntimeError(
                f"tokens_to_remove: got {tokens_to_remove}, needs fewer: tokens before the window are not kept"
            )
        DynamicLayer.crop(self, tokens_to_remove)
        if self.is_initialized:
            self.cumulative_length = self.first + self.keys.shape[2]
            self.released = min(self.released, self.cumulative_length)


_BOTH: Any = getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", DynamicSlidingWindowLayer)


class GrowingWindowAndStateLayer(GrowingWindowLayer, _BOTH):  # type: ignore[misc]
    """A layer of a window, as above, and of states of fixed size beside it."""


DUMMY: type = getattr(cache_utils, "DummyLayer", DynamicLayer)  # of layers that share keys, from transformers 5.23 on
KEPT = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DUMMY)


def new_cache(config: Any) -> DynamicCache:
    """An empty cache as generate would make it, of layers that grow.

    Raises:
        UnsupportedError: A layer keeps something that is neither keys and values by token nor a state of fixed size.
    """
    cache = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer()
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = GrowingWindowLayer(layer.sliding_window)
        elif type(layer) is _BOTH:
            cache.layers[index] = GrowingWindowAndStateLayer(layer.sliding_window, layer.number_of_states)
        elif type(layer) is DynamicIndexedLayer and index_reach(config) is not None:
            cache.layers[index] = GrowingIndexedLayer()
        elif type(layer) not in KEPT:
            raise UnsupportedError(f"a layer of its cache is a {type(layer).__name__}")
    return cache


def has_indexer(cache: DynamicCache) -> bool:
    """Whether sparse attention chooses by keys of its own in some layer."""
    return any(isinstance(layer, GrowingIndexedLayer) for layer in cache.layers)


def index_reach(config: Any) -> int | None:
    """Tokens of which an indexer takes all; of more it chooses, by scores whose order may hang on rounding."""
    reach = getattr(config.get_text_config(decoder=True), "index_topk", None)
    return reach if isinstance(reach, int) else None


def like(empty: DynamicCache) -> DynamicCache:
    """Another of the same layers as one of `new_cache` that is still empty, without asking the config again."""
    cache = copy.copy(empty)
    flat = (GrowingLayer, GrowingWindowLayer)
    cache.layers = [copy.copy(layer) if type(layer) in flat else copy.deepcopy(layer) for layer in empty.layers]
    return cache


def attention_layers(cache: DynamicCache) -> dict[int, Any]:
    """The layers that keep keys and values by token, by index; behind all of them the indexes that some have."""
    layers = {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)}
    indexed = {len(cache.layers) + i: x.index for i, x in layers.items() if isinstance(x, GrowingIndexedLayer)}
    return layers | indexed


def state_layers(cache: DynamicCache) -> dict[int, Any]:
    """The layers that keep a state of fixed size, by index."""
    return {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


def window_layers(cache: DynamicCache) -> list[GrowingWindowLayer]:
    """The layers that forget what is behind their window."""
    return [layer for layer in cache.layers if isinstance(layer, GrowingWindowLayer)]


def release(cache: DynamicCache, column: int) -> None:
    """Says that what is before a column is in blocks, or goes to none."""
    for layer in window_layers(cache):
        layer.released = max(layer.released, min(column, layer.cumulative_length))


def num_tokens(cache: DynamicCache) -> int:
    """Tokens whose keys and values every layer has; 0 for a cache of states alone."""
    lengths = [layer.get_seq_length() for layer in attention_layers(cache).values() if layer.keys is not None]
    return min(lengths, default=0)
