"""The store of one model's prompts: blocks, caches of past calls, hidden states and vision outputs."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....cache import CacheManager
from ..api import DynamicCache
from ..images import VisionOutputs
from ..layers import GrowingLayer, GrowingWindowLayer, attention_layers, like, new_cache, num_tokens, window_layers
from ..loop import CONTINUED
from ..probe import Probed
from ..runners.moved import Moving
from ..settings import CacheOptions, memory_budget
from .leases import AnyManager, Leases
from .storage import model_storage
from .tiers import LowerTiers

Layers = list[torch.Tensor]  # hidden states by layer, the embeddings first, `[num_tokens, width]` each


class ContiguousStore(Leases):
    """The manager of one model, the memory of its blocks, and the caches beside the blocks."""

    def __init__(self, model: Any, options: CacheOptions, probed: Probed, moving: Moving | None) -> None:
        anywhere = options.reuse == "anywhere"  # then layers with windows keep all blocks too
        windows = {} if anywhere else probed.windows
        self.storage = storage = model_storage(model, options, probed.specs, windows, probed.states)
        count, size, policy = storage.parts[0].num_blocks, options.block_size, options.policy
        groups, seed = storage.groups, options.chunk  # other chunks give other bits, so their blocks must not match
        manager = CacheManager(count, size, policy, groups=groups, seed=seed, partial_reuse=storage.any_prefix)
        super().__init__(manager)
        self.states = storage.states
        self.empty_cache = new_cache(model.config)  # the template of calls' caches
        self.vision = VisionOutputs(memory_budget(model) // 8)
        self.kept = KeptCaches(sum(part.num_blocks * part.bytes_per_block for _, part in storage.kv) // 4)
        self.hidden = HiddenStates(manager, memory_budget(model) // 2)
        self.evicted: LowerTiers | None = None  # blocks in host memory or on disk
        self.reuse, self.counts_padding = options.reuse, probed.counts_padding
        self.recompute = options.recompute
        self.moving = moving  # the way to move tokens; None unless reuse="anywhere"

    def make_cache(self, room: int) -> DynamicCache:
        """Return an empty cache for a call. Its buffers grow by at least `room` tokens at a time."""
        cache = like(self.empty_cache)
        for layer in attention_layers(cache).values():
            if isinstance(layer, GrowingLayer | GrowingWindowLayer):
                layer.room = room
        return cache

    def evict_to(self, evicted: LowerTiers) -> None:
        """Make `evicted` the lower tiers, which get evicted blocks from now on."""
        self.evicted, self.manager.on_evict = evicted, evicted.evicted


@dataclass(frozen=True, eq=False)
class _Content:
    """A record of a result's cache: tokens and mask `[batch, length]`, keys, salt, and the state of its buffers."""

    store: weakref.ref[Leases]
    tokens: torch.Tensor
    mask: torch.Tensor
    keys: tuple[Any, ...]
    salt: Any
    buffers: list[tuple[int, int]]

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a copy has buffers of its own, whose content is unknown."""

    def __reduce__(self) -> Any:
        return type(None), ()


def note_content(
    cache: Any, store: Leases, sequences: torch.Tensor, mask: Any, keys: tuple[Any, ...], salt: Any
) -> None:
    """Record the content of a result's cache on it, so that a later call can continue from the cache."""
    # `sequences [batch, length]` are prompts and answers; `mask [batch, columns]` is that of the prompts, or None.
    buffers = buffers_of(cache)
    if buffers is not None:
        tokens = sequences[:, : num_tokens(cache)].clone()
        whole = torch.ones_like(tokens)
        if mask is not None:
            whole[:, : mask.shape[1]] = mask
        setattr(cache, CONTINUED, _Content(weakref.ref(store), tokens, whole, keys, salt, buffers))


def continues(cache: Any, store: Leases, input_ids: torch.Tensor, mask: Any, keys: tuple[Any, ...], salt: Any) -> bool:
    """Return whether a call's inputs begin with the recorded content of a cache, which is still unchanged."""
    own = getattr(cache, CONTINUED, None)
    if not isinstance(own, _Content) or own.store() is not store or (own.keys, own.salt) != (keys, salt):
        return False
    length = num_tokens(cache)
    rows = torch.ones_like(input_ids) if mask is None else mask
    return (
        0 < length < input_ids.shape[1]
        and length <= own.tokens.shape[1]
        and rows.shape == input_ids.shape
        and input_ids.shape[0] == own.tokens.shape[0]
        and torch.equal(input_ids[:, :length], own.tokens[:, :length].to(input_ids.device))
        and torch.equal(rows[:, :length].long(), own.mask[:, :length].to(input_ids.device))
        and buffers_of(cache) == own.buffers
    )


def buffers_of(cache: DynamicCache) -> list[tuple[int, int]] | None:
    """Return the address and version of each buffer, which show writes to it; None if a layer has other tensors."""
    found = []
    for layer in attention_layers(cache).values():
        for name in ("keys", "values"):
            buffer, view = layer.__dict__.get(f"_{name}_buffer"), getattr(layer, name)
            if buffer is None or buffer.is_inference() or view.data_ptr() != buffer.data_ptr():
                return None
            found.append((buffer.data_ptr(), buffer._version))
    return found


@dataclass(frozen=True, eq=False)
class _Kept:
    """A kept cache of one row, with its tokens, keys and salt, and the state of its buffers."""

    cache: DynamicCache
    tokens: np.ndarray
    keys: tuple[Any, ...]
    salt: Any
    buffers: list[tuple[int, int]]
    nbytes: int


class KeptCaches:
    """The caches of the latest single-row calls, up to `max_bytes`.

    They save the copy of blocks into a new cache. They never extend a hit, which blocks alone decide.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._rows: list[_Kept] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        with self._lock:
            return sum(row.nbytes for row in self._rows)

    def put(self, cache: DynamicCache, sequence: np.ndarray, keys: tuple[Any, ...], salt: Any) -> None:
        """Keep a call's cache, which holds the first tokens of `sequence`, and drop the least recent caches."""
        buffers = buffers_of(cache)
        layers = attention_layers(cache).values()
        if not buffers or any(layer.keys.requires_grad for layer in layers):
            return
        nbytes = sum(layer._keys_buffer.nbytes + layer._values_buffer.nbytes for layer in layers)
        row = _Kept(cache, sequence[: num_tokens(cache)].copy(), keys, salt, buffers, nbytes)
        if nbytes <= self.max_bytes:
            with self._lock:
                rows, left = [row], self.max_bytes - nbytes
                for other in self._rows:
                    left -= other.nbytes
                    if left >= 0:
                        rows.append(other)
                self._rows = rows

    def take(self, tokens: np.ndarray, keys: tuple[Any, ...], salt: Any) -> DynamicCache | None:
        """Return a cache cropped to exactly these tokens, which then belongs to the caller; None if none begins so."""
        with self._lock:
            found = next((row for row in self._rows if _begins(row, tokens, keys, salt)), None)
            if found is None:
                return None
            self._rows = [row for row in self._rows if row is not found]
        if buffers_of(found.cache) != found.buffers:  # something has written to it since
            return None
        for layer in attention_layers(found.cache).values():
            first = (layer.first,) if isinstance(layer, GrowingWindowLayer) else ()
            layer.adopt(layer._keys_buffer, layer._values_buffer, len(tokens), *first)
        return found.cache


def _begins(row: _Kept, tokens: np.ndarray, keys: tuple[Any, ...], salt: Any) -> bool:
    """Return whether a kept cache begins with these tokens and can be cropped to them."""
    if any(layer.first > max(len(tokens) - layer.sliding_window + 1, 0) for layer in window_layers(row.cache)):
        return False  # it has dropped tokens that the shorter cache needs
    same = type(row.salt) is type(salt) and (row.keys, row.salt) == (keys, salt)
    return same and np.array_equal(row.tokens[: len(tokens)], tokens)


class HiddenStates:
    """Hidden states of whole blocks of a manager's first group, dropped in least-recently-used order.

    Those of a block are valid until the block is allocated again.
    """

    def __init__(self, manager: AnyManager, max_bytes: int) -> None:
        self._pool, self._size = manager.pools[0], manager.block_size
        self._max_bytes = max_bytes
        self._layers: Layers = []  # [max_blocks, block_size, width] each
        self._places: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by block: place, and time of its allocation
        self._free: list[int] = []  # unused places; an interrupt may lose a place, but never use one twice
        self._lock = threading.Lock()
        self.max_blocks: int | None = None  # as many as fit into `max_bytes`; None before the first `keep`

    def load(self, table: np.ndarray, num_tokens: int) -> Layers:
        """Return the hidden states of a table's first tokens, up to a block without any, `[found, width]` by layer."""
        with self._lock:
            blocks: list[int] = []
            for block in table[: -(-num_tokens // self._size)].tolist():
                if not self._has(block):
                    break
                blocks.append(block)
            if not blocks:
                return []
            self._touch(blocks)
            places = torch.tensor([self._places[block][0] for block in blocks])
            return [layer[places.to(layer.device)].flatten(0, 1)[:num_tokens] for layer in self._layers]

    def keep(self, table: np.ndarray, new: Sequence[torch.Tensor]) -> None:
        """Keep the hidden states of a table's first tokens, `[num_tokens, width]` for each layer, in whole blocks."""
        with self._lock:
            if self.max_blocks is None:
                self._make(new)
            if [(x.shape[-1], x.dtype) for x in new] != [(x.shape[-1], x.dtype) for x in self._layers]:
                return
            blocks = table[: min(len(new[0]) // self._size, self.max_blocks or 0)].tolist()
            self._touch(blocks)
            for number, block in enumerate(blocks):
                if not self._has(block):
                    place = self._place(block)
                    for layer, rows in zip(self._layers, new, strict=True):
                        layer[place] = rows[number * self._size : (number + 1) * self._size].detach()
                    self._places[block] = (place, int(self._pool.taken_at[block]))
            self._touch(blocks)

    def _has(self, block: int) -> bool:
        """Return whether a block has valid hidden states."""
        known = self._places.get(block)
        return known is not None and known[1] == self._pool.taken_at[block]

    def _touch(self, blocks: list[int]) -> None:
        """Mark blocks as used, so that the end of a prefix is dropped before its beginning."""
        for block in reversed(blocks):
            if block in self._places:
                self._places.move_to_end(block)

    def _place(self, block: int) -> int:
        """Return the place for a block: its own, an unused one, or that of the block used longest ago."""
        if block in self._places:
            return self._places.pop(block)[0]
        if self._free:
            return self._free.pop()
        return self._places.popitem(last=False)[1][0]

    def _make(self, like: Sequence[torch.Tensor]) -> None:
        """Allocate memory for hidden states of these widths and dtypes."""
        bytes_per_block = self._size * sum(layer.shape[-1] * layer.dtype.itemsize for layer in like)
        self.max_blocks = min(self._pool.num_blocks, self._max_bytes // max(bytes_per_block, 1))
        self._free = list(range(self.max_blocks))
        with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
            self._layers = [layer.new_empty(self.max_blocks, self._size, layer.shape[-1]) for layer in like]


def of_steps(steps: Sequence[Sequence[torch.Tensor]], row: int) -> Layers:
    """Return one row's hidden states, joined from those of all passes: `steps[pass][layer] [batch, tokens, width]`."""
    return [torch.cat([step[number][row] for step in steps]) for number in range(len(steps[0]))]
