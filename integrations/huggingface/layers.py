"""Layers of a cache that keep every token in buffers with room to grow, and return what the model's own layers return.

Layers of recurrent states can be continued too. Those of Mamba-1 need help: transformers' scan of several tokens begins
with zeros, whatever the cache has. A scan is linear in its initial state h_0. With the decay a_t of each token, the
state h_t lacks (a_1 ... a_t) h_0. The output lacks C_t times that (Gu and Dao, arXiv:2312.00752, section 2).
`install_scan` replaces the scan of a modeling file, once, by one that adds these terms. It acts within `from_states`
alone, where a cache layer sets the state that the next scan begins with.
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
from .calls import UnsupportedError
from .support import modeling_globals

ALIGNED = 16
"""Columns to whose multiples buffers are aligned.

The number of a column then decides where it lies between addresses of 64 bytes. A matrix product may round differently
at other addresses, and a row's bits must not depend on what was cached.
"""


def aligned(empty: Callable[[int], torch.Tensor], columns: int, first: int) -> torch.Tensor:
    """Return a buffer for `columns` columns from the number `first` on; `empty` allocates a number of columns."""
    before = first % ALIGNED
    whole = empty(-(-(before + columns) // ALIGNED) * ALIGNED)
    # `.data`: a view would keep the whole tensor alive, as one more holder of its memory.
    return whole[:, :, before : before + columns].data


def _is_shared(buffer: torch.Tensor) -> bool:
    """Return whether anything but a layer, with its buffer and the view of it, may have the buffer's memory."""
    count = holders_of(buffer)
    return count is None or count > HOLDERS


HOLDERS = 3  # the buffer, the view of its tokens, and the storage object by which they are counted


class _Growing:
    """Keys and values as views of buffers into which new tokens are written, in place of a concatenation a step."""

    keys: Any
    values: Any
    room = 64  # tokens of room that a new buffer gets, or half of what it holds where that is more

    def _extend(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """Append `new [batch, heads, tokens, width]`, in a new buffer if `keys` was replaced."""
        own = self.__dict__
        there: Any = own.get(name)
        buffer: Any = own.get(f"_{name}_buffer")
        batch, heads, tokens, width = new.shape
        length = there.shape[2] if there is not None and there.dim() == 4 else 0
        end = length + tokens
        own_buffer = buffer is not None and there is not None and there.data_ptr() == buffer.data_ptr()
        if own_buffer and length < own.get(f"_{name}_written", 0) and _is_shared(buffer):
            own_buffer = False  # another holder of `keys` still sees the tokens that were cropped
        if not own_buffer or batch != buffer.shape[0] or end > buffer.shape[2]:
            buffer = aligned(
                lambda columns: new.new_empty((batch, heads, columns, width)),
                end + max(self.room, end // 2 if length else 0),
                own.get("first", 0),
            )
            if length:
                buffer.narrow(2, 0, length).copy_(there)
            own[f"_{name}_buffer"], own[f"_{name}_written"] = buffer, length
        own[f"_{name}_written"] = max(own.get(f"_{name}_written", 0), end)
        buffer.narrow(2, length, tokens).copy_(new)
        grown: torch.Tensor = buffer.narrow(2, 0, end)
        own[name] = grown
        return grown

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Use buffers `[batch, heads, capacity, width]` whose first `length` tokens are filled."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        if self.__dict__.get("_keys_buffer") is not keys:
            self._keys_written = self._values_written = length
        self._keys_buffer, self._values_buffer = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]


class GrowingLayer(_Growing, DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer of full attention."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Append keys and values and return all of them."""
        keys, values = self._extend("keys", key_states), self._extend("values", value_states)
        if not self.is_initialized:  # without the empty tensors of `lazy_initialization`
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return keys, values


def _with_index(name: str) -> Any:
    """Return a method that acts on a layer and on its index alike."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(super(GrowingIndexedLayer, self), name)(*args, **kwargs)
        getattr(self.index, name)(*args, **kwargs)

    return method


class GrowingIndexedLayer(GrowingLayer, DynamicIndexedLayer):  # type: ignore[misc]
    """A layer of sparse attention, whose indexer has a key for each token: in `index`, as those of one head."""

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


class GrowingWindowLayer(_Growing, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer of sliding-window or chunked attention. It returns the window, and keeps the tokens that blocks lack."""

    first = 0  # column of the first key that is there
    released = 0  # columns before it are in blocks, or go to none: they may be forgotten behind the window
    slack = 1024  # tokens behind the window that are kept all the same: a later call may continue from there in place

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
        """Drop tokens that no later token reads, if a buffer is full or mostly unread; `_extend` then makes another."""
        unread = min(self.released, self.cumulative_length - self.sliding_window + 1) - self.first
        if unread <= self.slack or getattr(self, "record_past", False):
            return
        buffer, there = self.__dict__.get("_keys_buffer"), self.keys.shape[2]
        if buffer is None or there + new > buffer.shape[2] or unread > there - unread + new + self.room:
            self.keys, self.values = self.keys[:, :, unread:], self.values[:, :, unread:]
            self.first += unread

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0) -> None:
        """See `GrowingLayer`; the buffers have the columns from `first` up to `length`."""
        super().adopt(keys, values, length - first)
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
"""Within a pass: at most one tensor, the state that the next scan begins with."""


@contextmanager
def from_states() -> Iterator[None]:
    """Let the scans of a forward pass over a cache of `StateLayer`s begin with the cache's states."""
    token = _passes.set([])
    try:
        yield
    finally:
        _passes.reset(token)


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer of recurrent states, which a scan of several tokens begins with."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Do what transformers' own does, and set the state of the scan, before which every mixer calls this."""
        waiting, state = _passes.get(), self.recurrent_states[state_idx]
        if waiting is not None:
            waiting[:] = [state] if self.has_previous_state[state_idx] and state is not None else []
        full: torch.Tensor = super().update_conv_state(conv_states, state_idx=state_idx, **kwargs)
        return full


class GrowingWindowAndStateLayer(GrowingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc]
    """A layer of a window, as above, and of states of fixed size beside it."""


GROWING: dict[type, Callable[[Any], Any]] = {
    DynamicLayer: lambda layer: GrowingLayer(),
    DynamicSlidingWindowLayer: lambda layer: GrowingWindowLayer(layer.sliding_window),
    DynamicIndexedLayer: lambda layer: GrowingIndexedLayer(),
    LinearAttentionLayer: lambda layer: StateLayer(layer.number_of_states),
    LinearAttentionAndFullAttentionLayer: lambda layer: layer,
    LinearAttentionAndSlidingWindowAttentionLayer: (
        lambda layer: GrowingWindowAndStateLayer(layer.sliding_window, layer.number_of_states)
    ),
    DummyLayer: lambda layer: layer,  # of layers that read another layer's keys
}
"""By type of a transformers layer, a function that returns the layer served in its place."""


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
        if isinstance(layer, LinearAttentionCacheLayerMixin | DynamicIndexedLayer):
            need(SPARSE if kind is DynamicIndexedLayer else STATES)
        cache.layers[index] = GROWING[kind](layer)
    return cache


def index_reach(config: Any) -> int | None:
    """Return the number of tokens up to which an indexer takes all; beyond it, its choice may depend on rounding."""
    reach = getattr(config.get_text_config(decoder=True), "index_topk", None)
    return reach if isinstance(reach, int) else None


def like(empty: DynamicCache) -> DynamicCache:
    """Return another cache of the same layers as an empty one of `new_cache`, without reading the config again."""
    cache = copy.copy(empty)
    flat = (GrowingLayer, GrowingWindowLayer)
    cache.layers = [copy.copy(layer) if type(layer) in flat else copy.deepcopy(layer) for layer in empty.layers]
    return cache


def attention_layers(cache: DynamicCache) -> dict[int, Any]:
    """Return the layers that keep keys and values by token, by number, and behind them the indexes of some layers."""
    layers = {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)}
    indexed = {len(cache.layers) + i: x.index for i, x in layers.items() if isinstance(x, GrowingIndexedLayer)}
    return layers | indexed


def state_layers(cache: DynamicCache) -> dict[int, Any]:
    """Return the layers that keep a state of fixed size, by number."""
    return {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


def window_layers(cache: DynamicCache) -> list[GrowingWindowLayer]:
    """Return the layers that drop tokens behind their window."""
    return [layer for layer in cache.layers if isinstance(layer, GrowingWindowLayer)]


def mark_written(cache: DynamicCache, column: int) -> None:
    """Note that the tokens before a column are in blocks, or will not be."""
    for layer in window_layers(cache):
        layer.released = max(layer.released, min(column, layer.cumulative_length))


def num_tokens(cache: DynamicCache) -> int:
    """Return the number of tokens whose keys and values every layer has; 0 for a cache of states alone."""
    lengths = [layer.get_seq_length() for layer in attention_layers(cache).values() if layer.keys is not None]
    return min(lengths, default=0)


def columns(cache: DynamicCache) -> set[int]:
    """Return how many columns layers have had: one number, unless something besides them took tokens away."""
    found = set()
    for layer in attention_layers(cache).values():
        if layer.keys is not None:
            found.add(getattr(layer, "first", 0) + int(layer.keys.shape[2]))
            found |= {layer.cumulative_length} if isinstance(layer, GrowingWindowLayer) else set()
    return found


States = dict[str, torch.Tensor]  # of one row: by layer, kind and index ("3 recurrent 0") the state, `[1, ...]`


def take_states(cache: DynamicCache, row: int) -> States:
    """Return copies of a row's states; layers change their own in place."""
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
    """Replace the scan in the files that define a model's forwards, once each, and return whether there is one."""
    # It stays: outside of `from_states` it costs a look-up, and taking it out could hit a pass of another model.
    found = False
    for names in modeling_globals(model):
        scan = names.get(SCAN)
        if callable(scan):
            found = True
            if not hasattr(scan, "_pc_original"):
                names[SCAN] = _from_state(scan)  # one assignment: a thread sees the one or the other
    return found


def _from_state(scan: Callable[..., Any]) -> Callable[..., Any]:
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
    """Return the terms that an initial state adds to a scan's outputs, and the state that remains behind them."""
    # `state [batch, channels, states]`. `dt [batch, channels, tokens]` are time steps,
    # `decay [channels, states]` < 0; `outputs [batch, states, tokens]`: C.
    parts = []
    for begin in range(0, dt.shape[-1], SCAN_CHUNK):
        step, readout = dt[..., begin : begin + SCAN_CHUNK], outputs[..., begin : begin + SCAN_CHUNK]
        states = torch.exp(step.cumsum(-1)[..., None] * decay[:, None]) * state[:, :, None]
        parts.append(torch.einsum("bctn,bnt->bct", states, readout))
        state = states[:, :, -1]
    return torch.cat(parts, -1), state
