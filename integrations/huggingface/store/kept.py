"""The store of one model's prompts: blocks, caches of past calls, hidden states and vision outputs."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from ....cache import CacheManager
from ....cache.observe.stats import CacheStats
from ..api import DynamicCache
from ..images import VisionOutputs
from ..layers import GrowingLayer, attention_layers, like, new_cache, num_tokens, window_layers
from ..loop import CONTINUED, Loop
from ..probe import Probed
from ..settings import CacheOptions, memory_budget
from ..support import evict, host_copy
from .blocks import free
from .storage import AnyManager, model_storage
from .tiers import LowerTiers

Layers = Sequence[torch.Tensor]  # hidden states by layer, the embeddings first, `[num_tokens, width]` each


class PromptStore:
    """The manager of one model, the memory of its blocks, and the caches beside the blocks."""

    def __init__(self, model: Any, options: CacheOptions, probed: Probed, scheduled: bool = False) -> None:
        # `scheduled`: a scheduler allocates blocks as it computes tokens, and its hits end at block ends.
        anywhere = options.reuse == "anywhere"  # then layers with windows keep all blocks too
        windows = {} if anywhere else probed.windows
        self.storage = storage = model_storage(model, options, probed.specs, windows, probed.states)
        count, size, policy = storage.parts[0].num_blocks, options.block_size, options.policy
        groups, seed = storage.groups, options.chunk  # other chunks give other bits, so their blocks must not match
        manager = CacheManager(
            count, size, policy, groups=groups, seed=seed, partial_reuse=storage.any_prefix and not scheduled
        )
        self.manager: AnyManager = manager
        self.block_size = size
        # Whether an admitted prompt gets blocks for its cached tokens only, and the others later.
        self.by_steps = scheduled or storage.chunk is not None
        # The next call ends requests without an owner. A finalizer cannot, because Python drops an interrupt in it.
        self.running: dict[weakref.ref[Any], list[str]] = {}  # by `PromptRequests` of a call: its request ids
        self._subtracted = [0, 0, 0]  # requests, tokens and hits that `stats` subtracts from the manager's counts
        self.options, self.probed = options, probed
        self.states = storage.states
        self.empty_cache = new_cache(model.config)  # the template of calls' caches
        self.vision = VisionOutputs(memory_budget(model) // 8)
        # The caches of the latest single-row calls, with their bytes. They never extend a hit: blocks alone decide it.
        self._caches: OrderedDict[int, tuple[DynamicCache, CacheRecord, int]] = OrderedDict()
        self._max_bytes = sum(part.num_blocks * part.bytes_per_block for _, part in storage.kv) // 4
        self._lock = threading.Lock()
        self.hidden = HiddenStates(manager, memory_budget(model) // 2)
        self.evicted = LowerTiers(storage, 0)  # blocks in host memory or on disk

    def sweep(self) -> None:
        """End the requests of calls that were interrupted, or whose thread a fork has left in the parent process."""
        for owner, request_ids in list(self.running.items()):
            requests = owner()
            if requests is None or requests.lost():
                for request_id in request_ids:
                    free(self.manager, request_id)
                self.running.pop(owner, None)  # another thread may have removed it too

    def subtract(self, requests: int, tokens: int, hits: int) -> None:
        """Subtract a search that was cancelled or made again from the counts, or add hits in lower tiers as `-hits`."""
        with self._lock:
            self._subtracted = [a + b for a, b in zip(self._subtracted, (requests, tokens, hits), strict=True)]

    def stats(self) -> CacheStats:
        """Return the manager's counts without cancelled searches, with the hits in lower tiers as prefix hits."""
        self.sweep()
        counts, (requests, tokens, hits) = self.manager.stats(), self._subtracted
        by_cause = counts.hit_tokens_by_cause | {"prefix": counts.hit_tokens_by_cause["prefix"] - hits}
        return replace(
            counts,
            total_requests=counts.total_requests - requests,
            queried_tokens=counts.queried_tokens - tokens,
            hit_tokens=counts.hit_tokens - hits,
            hit_tokens_by_cause=by_cause,
        )

    def make_cache(self, room: int) -> DynamicCache:
        """Return an empty cache for a call, whose buffers grow by at least `room` tokens."""
        cache = like(self.empty_cache)
        for layer in attention_layers(cache).values():
            if isinstance(layer, GrowingLayer):
                layer.room = room
        return cache

    def keep_cache(self, cache: DynamicCache, sequence: np.ndarray, loop: Loop) -> None:
        """Keep a call's cache for later calls, which then copy no blocks. It holds the first tokens of `sequence`."""
        record, layers = record_of(cache, self, sequence[None], loop), attention_layers(cache).values()
        if record is None or not record.buffers or any(layer.keys.requires_grad for layer in layers):
            return
        nbytes = sum(layer._keys_buffer.nbytes + layer._values_buffer.nbytes for layer in layers)
        if nbytes <= self._max_bytes:
            with self._lock:
                self._caches[id(cache)] = cache, record, nbytes
                evict(self._caches, self._max_bytes, itemgetter(2))

    def take_cache(self, tokens: np.ndarray, loop: Loop) -> DynamicCache | None:
        """Return a kept cache cropped to exactly these tokens, or None. It then belongs to the caller."""
        mask, length = np.ones((1, len(tokens)), np.bool_), len(tokens)
        with self._lock:
            latest_first = reversed(self._caches.values())
            known = (cache for cache, record, _ in latest_first if record.begins(tokens[None], mask, loop))
            latest = next((cache for cache in known if _can_crop(cache, length)), None)
            if latest is None:
                return None
            cache, record, _ = self._caches.pop(id(latest))
        if buffers_of(cache) != record.buffers:  # something has written to it since
            return None
        for layer in attention_layers(cache).values():
            layer.adopt(layer._keys_buffer, layer._values_buffer, length, layer.first)
        return cache


@dataclass(frozen=True, eq=False)
class CacheRecord:
    """A record of the content of a call's cache, with which a later call can continue from the cache."""

    store: weakref.ref[PromptStore]
    tokens: np.ndarray  # [batch, length]
    mask: np.ndarray  # [batch, length] bool
    identity: tuple[Any, ...]  # all that their KV depends on besides the tokens
    buffers: list[tuple[int, int]]  # as `buffers_of` returned them

    def begins(self, tokens: np.ndarray, mask: np.ndarray, loop: Loop) -> bool:
        """Return whether the content begins with these tokens of a call, `[batch, length]`."""
        length = tokens.shape[1]
        same = np.array_equal(tokens, self.tokens[:, :length]) and np.array_equal(mask, self.mask[:, :length])
        return same and self.identity == _identity(loop)

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a copy has other buffers, whose content is unknown."""

    def __reduce__(self) -> Any:
        return type(None), ()


def _identity(loop: Loop) -> tuple[Any, ...]:
    """Return everything that the KV of a call's tokens depends on besides the tokens."""
    return loop.extra_keys, loop.adapters, type(loop.salt), loop.salt


def record_of(
    cache: Any, store: PromptStore, sequences: np.ndarray, loop: Loop, mask: torch.Tensor | None = None
) -> CacheRecord | None:
    """Return a record of a cache; None if a layer's keys or values are not in its own buffers.

    The cache holds the first tokens of `sequences [batch, length]`, which are prompts with their answers. `mask` is the
    mask of the prompts.
    """
    buffers = buffers_of(cache)
    if buffers is None:
        return None
    tokens = sequences[:, : num_tokens(cache)].copy()
    whole = np.ones(tokens.shape, np.bool_)
    if mask is not None:
        whole[:, : mask.shape[1]] = host_copy(mask)
    return CacheRecord(weakref.ref(store), tokens, whole, _identity(loop), buffers)


def continues(cache: Any, store: PromptStore, loop: Loop) -> bool:
    """Return whether a call's inputs begin with the recorded content of a cache, which is still unchanged."""
    own, length = getattr(cache, CONTINUED, None), num_tokens(cache)
    if not isinstance(own, CacheRecord) or own.store() is not store or buffers_of(cache) != own.buffers:
        return False
    ids = host_copy(loop.input_ids)
    mask = np.ones(ids.shape, np.bool_) if loop.mask is None else host_copy(loop.mask).astype(bool)
    if mask.shape != ids.shape or not 0 < length < ids.shape[1]:
        return False
    return own.begins(ids[:, :length], mask[:, :length], loop)


def buffers_of(cache: DynamicCache) -> list[tuple[int, int]] | None:
    """Return the address and version of each layer's buffers. Each write to a buffer changes its version.

    Return None if a layer's keys or values are not in its own buffers, or a buffer has no version.
    """
    found = []
    for layer in attention_layers(cache).values():
        for name in ("keys", "values"):
            buffer, view = layer.__dict__.get(f"_{name}_buffer"), getattr(layer, name)
            if buffer is None or view is None or buffer.is_inference() or view.data_ptr() != buffer.data_ptr():
                return None
            found.append((buffer.data_ptr(), buffer._version))
    return found


def _can_crop(cache: DynamicCache, length: int) -> bool:
    """Return whether a cache still has all tokens that the next token reads after a crop to `length`."""
    return all(layer.first <= max(length - layer.sliding_window + 1, 0) for layer in window_layers(cache))


class HiddenStates:
    """Hidden states of whole blocks of a manager's first group, dropped in least-recently-used order.

    The hidden states of a block are valid until the block is allocated again.
    """

    def __init__(self, manager: AnyManager, max_bytes: int) -> None:
        self._pool, self._size = manager.pools[0], manager.block_size
        self._max_bytes = max_bytes
        self._shapes: list[tuple[int, torch.dtype]] = []  # width and dtype of each layer
        # By block: the time of its allocation, and its rows of each layer, `[block_size, width]`.
        self._blocks: OrderedDict[int, tuple[int, Layers]] = OrderedDict()
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
            self._touch(blocks)
            by_layer = zip(*(self._blocks[block][1] for block in blocks), strict=True)
            return [torch.cat(rows)[:num_tokens] for rows in by_layer]

    def keep(self, table: np.ndarray, new: Layers) -> None:
        """Keep the hidden states of a table's first tokens, `[num_tokens, width]` for each layer, in whole blocks."""
        shapes = [(rows.shape[-1], rows.dtype) for rows in new]
        with self._lock:
            if self.max_blocks is None:
                nbytes = self._size * sum(width * dtype.itemsize for width, dtype in shapes)
                self.max_blocks = min(self._pool.num_blocks, self._max_bytes // max(nbytes, 1))
                self._shapes = shapes
            if shapes != self._shapes:
                return
            blocks = table[: min(len(new[0]) // self._size, self.max_blocks)].tolist()
            for number, block in enumerate(blocks):
                if not self._has(block):
                    rows = slice(number * self._size, (number + 1) * self._size)
                    self._blocks[block] = int(self._pool.taken_at[block]), [x[rows].detach().clone() for x in new]
            self._touch(blocks)
            evict(self._blocks, self.max_blocks, lambda _: 1)

    def _has(self, block: int) -> bool:
        """Return whether a block has valid hidden states."""
        known = self._blocks.get(block)
        return known is not None and known[0] == self._pool.taken_at[block]

    def _touch(self, blocks: list[int]) -> None:
        """Mark blocks of a prefix as recently used, its first block last, so that its end is dropped first."""
        for block in reversed(blocks):
            self._blocks.move_to_end(block)


def of_steps(steps: Sequence[Sequence[torch.Tensor]], row: int) -> Layers:
    """Return one row's hidden states, joined from those of all passes: `steps[pass][layer] [batch, tokens, width]`."""
    return [torch.cat([step[number][row] for step in steps]) for number in range(len(steps[0]))]
