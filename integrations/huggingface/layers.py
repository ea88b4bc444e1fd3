"""Cache layers whose buffers have room to grow. They return the same tensors as transformers' own layers.

Recurrent states are restored too. Mamba-1 needs a correction for this: transformers' scan of several tokens begins with
zeros even if the cache has a state. A scan is linear in its initial state h_0. With the decay a_t of each token, the
state h_t lacks (a_1 ... a_t) h_0. The output lacks C_t times that (Gu and Dao, arXiv:2312.00752, section 2).
`install_scan` replaces the scan of a modeling file, once, by one that adds these terms. It adds them only within
`from_states`, where a `StateLayer` sets the initial state of the next scan.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from .api import (
    SPARSE,
    STATES,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    holders_of,
    length_behind_crop,
    need,
)
from .calls import UnsupportedError, refuse_if
from .support import modeling_globals

ALIGNED = 16
"""Buffers begin and end at multiples of this number of columns.

A column's number then determines its address modulo 64 bytes. A matrix product may round differently at another
address, and the bits of a row must not depend on what was cached.
"""


def aligned(sizes: tuple[int, ...], columns: int, first: int, like: Any) -> torch.Tensor:
    """Return a buffer `[batch, heads, columns, width]`, beginning with column number `first`.

    Args:
        sizes: The batch, the heads and the width.
        columns: The number of columns.
        first: The number of the first column.
        like: A tensor or `TensorSpec` of the buffer's dtype and device.
    """
    (batch, heads, width), before = sizes, first % ALIGNED
    shape = (batch, heads, -(-(before + columns) // ALIGNED) * ALIGNED, width)
    whole = torch.empty(shape, dtype=like.dtype, device=like.device)
    # `.data`: a view would keep the whole tensor as another holder of the memory, and `_extend` counts holders.
    return whole[:, :, before : before + columns].data


HOLDERS = 3  # holders of unshared memory: the buffer, the view of its tokens, the storage object that counts them


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer whose keys and values are views of buffers. New tokens are written there, without concatenation."""

    keys: Any
    values: Any
    room = 64  # spare tokens of a new buffer, or half of its content if that is more
    first = 0  # column of the first key in the buffer; layers with a window drop columns
    new_buffer = staticmethod(aligned)

    def _extend(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """Append `new [batch, heads, tokens, width]` to `keys` or `values` and return all tokens.

        A new buffer is made if the old one is full or shared, or if the attribute was replaced. Tokens of two dtypes
        are concatenated, which promotes them as in transformers' own layer.
        """
        own = self.__dict__
        there: Any = own.get(name)
        buffer: Any = own.get(f"_{name}_buffer")
        batch, heads, tokens, width = new.shape
        length = there.shape[2] if there is not None and there.dim() == 4 else 0
        end = length + tokens
        if length and there.dtype != new.dtype:  # as after `model.double()` within a call
            own[name], own[f"_{name}_buffer"] = torch.cat([there, new], 2), None
            promoted: torch.Tensor = own[name]
            return promoted
        own_buffer = buffer is not None and there is not None and there.data_ptr() == buffer.data_ptr()
        if own_buffer and length < own.get(f"_{name}_written", 0) and holders_of(buffer) > HOLDERS:
            own_buffer = False  # tokens were cropped, and another holder may still read them
        if own_buffer and (torch.is_grad_enabled() or own.get(f"_{name}_saved", False)):
            own_buffer = False  # a backward pass may need the buffer as it is, even if keys need no gradients
        if not own_buffer or batch != buffer.shape[0] or end > buffer.shape[2]:
            room = max(self.room, end // 2 if length else 0)
            buffer = self.new_buffer((batch, heads, width), end + room, self.first, new)
            if length:
                buffer.narrow(2, 0, length).copy_(there)
            own[f"_{name}_buffer"] = buffer
        own[f"_{name}_written"], own[f"_{name}_saved"] = end, torch.is_grad_enabled()
        buffer.narrow(2, length, tokens).copy_(new)
        grown: torch.Tensor = buffer.narrow(2, 0, end)
        own[name] = grown
        return grown

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0) -> None:
        """Use buffers `[batch, heads, capacity, width]`, which hold the columns from `first` up to `length`."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        filled = length - first
        if self.__dict__.get("_keys_buffer") is not keys:
            self._keys_written = self._values_written = filled
        self._keys_buffer, self._values_buffer = keys, values
        self.keys, self.values = keys[:, :, :filled], values[:, :, :filled]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Append keys and values and return all of them."""
        keys, values = self._extend("keys", key_states), self._extend("values", value_states)
        if not self.is_initialized:  # without the empty tensors of `lazy_initialization`
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return keys, values


def _with_index(name: str) -> Any:
    """Return a method that calls the method `name` of a layer and of its index."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(super(GrowingIndexedLayer, self), name)(*args, **kwargs)
        getattr(self.index, name)(*args, **kwargs)

    return method


class GrowingIndexedLayer(GrowingLayer, DynamicIndexedLayer):  # type: ignore[misc]
    """A layer of sparse attention. `index` keeps its indexer's key of each token, as a layer with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.index = GrowingLayer()

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append keys of the indexer, `[batch, tokens, width]`, and return all of them."""
        states = indexer_key_states[:, None]
        keys, _ = self.index.update(states, states[..., :0])
        all_keys: torch.Tensor = keys[:, 0]
        return all_keys

    crop, reset = _with_index("crop"), _with_index("reset")
    reorder_cache = _with_index("reorder_cache")
    batch_repeat_interleave = _with_index("batch_repeat_interleave")
    batch_select_indices = _with_index("batch_select_indices")


class GrowingWindowLayer(GrowingLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer of sliding-window or chunked attention.

    It returns the tokens of the window. It also keeps older ones that are not in blocks yet.
    """

    released = 0  # earlier columns are in blocks or never will be, so they may be dropped once they leave the window
    slack = 1024  # tokens that stay after they leave the window, so that a later call can continue there

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Append keys and values and return those that transformers' own layer would return."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._forget(key_states.shape[2])
        self.cumulative_length += key_states.shape[2]
        visible = self.sliding_window - 1 + key_states.shape[2]
        keys, values = self._extend("keys", key_states), self._extend("values", value_states)
        return keys[:, :, -visible:], values[:, :, -visible:]

    def _forget(self, new: int) -> None:
        """Drop tokens that no later token reads, if the buffer is full or mostly unread.

        `_extend` then copies the remaining tokens to a new buffer.
        """
        unread = min(self.released, self.cumulative_length - self.sliding_window + 1) - self.first
        if unread <= self.slack or getattr(self, "record_past", False):
            return
        buffer, there = self.__dict__.get("_keys_buffer"), self.keys.shape[2]
        if buffer is None or there + new > buffer.shape[2] or unread > there - unread + new + self.room:
            self.keys, self.values = self.keys[:, :, unread:], self.values[:, :, unread:]
            self.first += unread

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0) -> None:
        """Use buffers as `GrowingLayer.adopt` does."""
        super().adopt(keys, values, length, first)
        self.cumulative_length, self.first, self.released = length, first, first

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        Raises:
            RuntimeError: The window before the last remaining token was dropped.
        """
        left = length_behind_crop(self.cumulative_length, tokens_to_remove)
        if left < self.cumulative_length and left - self.sliding_window + 1 < self.first > 0:
            raise RuntimeError(
                f"tokens_to_remove: got {tokens_to_remove}, needs fewer: tokens before the window are not kept"
            )
        if self.is_initialized and left < self.cumulative_length:
            kept = max(left - self.first, 0)
            self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
            self.cumulative_length = self.first + kept
            self.released = min(self.released, self.cumulative_length)


SCAN = "mamba_selective_scan"
SCAN_CHUNK = 256  # tokens whose carried states `[batch, channels, tokens, states]` are in memory together

_passes: ContextVar[list[torch.Tensor] | None] = ContextVar("pc_scan", default=None)
"""Within `from_states`: a list of at most one tensor, the initial state of the next scan."""


@contextmanager
def from_states() -> Iterator[None]:
    """Return a context in which scans begin with the states that the `StateLayer`s of the cache hold."""
    token = _passes.set([])
    try:
        yield
    finally:
        _passes.reset(token)


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer of recurrent states that also begins scans of several tokens with its state."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Update as transformers does, and set the initial state of the scan, which every mixer runs after this."""
        waiting, state = _passes.get(), self.recurrent_states[state_idx]
        if waiting is not None:
            waiting[:] = [state] if self.has_previous_state[state_idx] and state is not None else []
        full: torch.Tensor = super().update_conv_state(conv_states, state_idx=state_idx, **kwargs)
        return full


class GrowingWindowAndStateLayer(GrowingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc]
    """A layer with a sliding window and with states of fixed size."""


GROWING: dict[type, Callable[[Any], Any]] = {
    DynamicLayer: lambda layer: GrowingLayer(),
    DynamicSlidingWindowLayer: lambda layer: GrowingWindowLayer(layer.sliding_window),
    DynamicIndexedLayer: lambda layer: GrowingIndexedLayer(),
    LinearAttentionLayer: lambda layer: StateLayer(layer.number_of_states),
    LinearAttentionAndFullAttentionLayer: lambda layer: layer,
    LinearAttentionAndSlidingWindowAttentionLayer: (
        lambda layer: GrowingWindowAndStateLayer(layer.sliding_window, layer.number_of_states)
    ),
    DummyLayer: lambda layer: layer,  # for layers that read another layer's keys
}
"""For each type of transformers' cache layers, a function that returns the layer that replaces it."""


def new_cache(config: Any) -> DynamicCache:
    """Return an empty cache of layers that grow.

    Raises:
        UnsupportedError: A layer keeps neither KV by token nor a state of fixed size.
    """
    cache = DynamicCache(config=config)
    for index, layer in enumerate(list(cache.layers)):
        kind = type(layer)
        if kind not in GROWING or (kind is DynamicIndexedLayer and index_reach(config) is None):
            raise UnsupportedError(f"a layer of its cache is a {kind.__name__}")
        file = getattr(getattr(kind, "update", None), "__globals__", {}).get("__name__")
        replaced = isinstance(layer, DynamicLayer) and not str(file).startswith(("transformers.", "torch."))
        refuse_if(replaced, f"update of {kind.__name__} was replaced")  # layers that grow have one of their own
        if isinstance(layer, LinearAttentionCacheLayerMixin | DynamicIndexedLayer):
            need(SPARSE if kind is DynamicIndexedLayer else STATES)
        cache.layers[index] = GROWING[kind](layer)
    return cache


def index_reach(config: Any, name: str = "index_topk") -> int | None:
    """Return the number of tokens up to which attention selects all keys; None if it does not select by their scores.

    With more tokens, rounding may change its choice. `name` is the setting's: Doge has no indexer, and names it
    `keep_window_size`.
    """
    reach = getattr(config.get_text_config(decoder=True), name, None)
    return reach if isinstance(reach, int) else None


def like(empty: DynamicCache) -> DynamicCache:
    """Return a copy of an empty cache of `new_cache`, which is faster than reading the config again."""
    cache = copy.copy(empty)
    flat = (GrowingLayer, GrowingWindowLayer)
    cache.layers = [copy.copy(layer) if type(layer) in flat else copy.deepcopy(layer) for layer in empty.layers]
    return cache


def attention_layers(cache: DynamicCache) -> dict[int, Any]:
    """Return the layers that keep KV of each token, by number. Indexes of sparse layers get numbers after the last."""
    layers = {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)}
    indexed = {len(cache.layers) + i: x.index for i, x in layers.items() if isinstance(x, GrowingIndexedLayer)}
    return layers | indexed


def filled_layers(cache: DynamicCache) -> dict[int, Any]:
    """Return the layers of `attention_layers` that have keys. In a filled cache, the others read keys of these."""
    return {i: layer for i, layer in attention_layers(cache).items() if layer.keys is not None}


def state_layers(cache: DynamicCache) -> dict[int, Any]:
    """Return the layers that keep a state of fixed size, by number."""
    return {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


def window_layers(cache: DynamicCache) -> list[GrowingWindowLayer]:
    """Return the layers that drop tokens behind their window."""
    return [layer for layer in cache.layers if isinstance(layer, GrowingWindowLayer)]


def mark_written(cache: DynamicCache, column: int) -> None:
    """Let layers drop the tokens before a column, which are in blocks or never will be."""
    for layer in window_layers(cache):
        layer.released = max(layer.released, min(column, layer.cumulative_length))


def num_tokens(cache: DynamicCache) -> int:
    """Return the number of tokens whose keys and values every layer has; 0 for a cache of states alone."""
    return min((layer.get_seq_length() for layer in filled_layers(cache).values()), default=0)


def columns(cache: DynamicCache) -> set[int]:
    """Return the distinct column counts of the layers. There is only one, unless other code removed tokens."""
    found = set()
    for layer in filled_layers(cache).values():
        found.add(getattr(layer, "first", 0) + int(layer.keys.shape[2]))
        found |= {layer.cumulative_length} if isinstance(layer, GrowingWindowLayer) else set()
    return found


States = dict[str, torch.Tensor]  # the states `[1, ...]` of one row, by layer, kind and index: "3 recurrent 0"


def take_states(cache: DynamicCache, row: int) -> States:
    """Return copies of a row's states, because layers change them in place."""
    return {
        f"{at} {kind} {index}": state[row : row + 1].clone()
        for at, layer in state_layers(cache).items()
        for kind in ("conv", "recurrent")
        for index, state in getattr(layer, f"{kind}_states").items()
        if state is not None
    }


def put_states(cache: DynamicCache, rows: list[States]) -> None:
    """Put the states of rows into the layers of an empty cache."""
    for name in rows[0]:
        at, kind, index = name.split()
        layer = cache.layers[int(at)]
        getattr(layer, f"update_{kind}_state")(torch.cat([row[name] for row in rows]), int(index))
        layer.has_previous_state[int(index)] = True


def install_scan(model: torch.nn.Module) -> bool:
    """Replace the scan in a model's modeling files, once each, and return whether there is a scan."""
    # Never undone: outside of `from_states` it costs a look-up, and removing it could disturb another model's pass.
    found = False
    for names in modeling_globals(model):
        scan = names.get(SCAN)
        if callable(scan):
            found = True
            if not hasattr(scan, "_pc_original"):
                names[SCAN] = _from_state(scan)  # one assignment: a thread sees the one or the other
    return found


def _from_state(scan: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scan that runs `scan` and adds the terms of the initial state, if one is set."""

    @functools.wraps(scan)
    def scanned(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        waiting = _passes.get()
        initial = waiting.pop() if waiting else None
        options = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        result = scan(hidden_states, dt, A, B, C, return_last_state=return_last_state, **options, **kwargs)
        if initial is None:
            return result
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if delta_softplus:
            dt = softplus(dt)
        carried, last = _carried(initial.float(), dt.float(), A.float(), C.float())
        if z is not None:
            carried = carried * silu(z.float())
        if not return_last_state:
            return result + carried.to(result.dtype)
        out, state = result
        return out + carried.to(out.dtype), state + last.to(state.dtype)

    scanned._pc_original = scan  # type: ignore[attr-defined]
    return scanned


def _carried(
    state: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, outputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms that an initial state adds to a scan's outputs and to its last state."""
    # `state [batch, channels, states]`. `dt [batch, channels, tokens]` are time steps,
    # `decay [channels, states]` < 0; `outputs [batch, states, tokens]`: C.
    parts = []
    for begin in range(0, dt.shape[-1], SCAN_CHUNK):
        step, readout = dt[..., begin : begin + SCAN_CHUNK], outputs[..., begin : begin + SCAN_CHUNK]
        states = torch.exp(step.cumsum(-1)[..., None] * decay[:, None]) * state[:, :, None]
        parts.append(torch.einsum("bctn,bnt->bct", states, readout))
        state = states[:, :, -1]
    return torch.cat(parts, -1), state
