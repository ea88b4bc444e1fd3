"""Rows of a batch as requests of the manager: what each of them has cached, and what its cache is written to."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ....cache import OutOfBlocks
from ..store import Lease, Store
from ..support import UnsupportedError
from ..uninterrupted import uninterrupted
from .layers import attention_layers
from .pictures import Item, Pictures, clear_of
from .states import States
from .storage import BlockIds

_numbers = itertools.count()


@dataclass
class Prompt:
    """One prompt of a call, for all rows that begin with it.

    Attributes:
        request_id: Its name in the manager.
        tokens: The tokens from the first that the mask leaves up to the next that it does not, `[n]` int64.
        pad: Columns before them.
        rows: The rows of the batch that have it.
        cached: How many of the tokens are read from blocks.
        shared: The KV hit, where it is longer than what states allow to use.
        written: Blocks whose content is there.
        later: Spans behind the first missing block that are read from blocks too.
        waits: Whether somebody is computing its next block at this moment.
        items: Its images.
        adapter: Named for its rows; None where none is.
        pictures: Of the call; None where this prompt has no image.
    """

    request_id: str
    tokens: np.ndarray
    pad: int
    rows: list[int]
    cached: int = 0
    shared: int = 0
    written: int = 0
    waits: bool = False
    later: list[tuple[int, int]] = field(default_factory=list)
    table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    states: States | None = None
    items: list[Item] = field(default_factory=list)
    adapter: str | None = None
    pictures: Pictures | None = None

    def readable(self, length: int) -> int:
        """So many tokens, or fewer where what is behind them cannot be computed."""
        within = self.pictures is None or self.pictures.goes_on.reads
        return length if within else clear_of(self.items, length + self.pad) - self.pad

    def computable(self, length: int) -> bool:
        """Whether so many tokens may be computed before the rest."""
        within = self.pictures is None or self.pictures.goes_on.computes
        return within or clear_of(self.items, length + self.pad) == length + self.pad

    def inputs(self, start: int, end: int) -> dict[str, Any] | None:
        """Inputs besides tokens of a forward pass over its tokens `start` to `end`; None where it has no image."""
        if self.pictures is None:
            return None
        features = {"mm_encoder_outputs": self.pictures.features(self.items, self.pad + start, self.pad + end)}
        return self.pictures.inputs(self.rows[0], self.pad, self.pad + end) | features


def prompts_of(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    pictures: Pictures | None = None,
    adapters: list[str] | None = None,
) -> list[Prompt]:
    """The distinct prompts of a batch, in the order in which rows show them."""
    ids = input_ids.cpu().numpy()
    kept = np.ones(ids.shape, bool) if mask is None else mask.cpu().numpy().astype(bool)
    found: dict[tuple[Any, ...], Prompt] = {}
    for row, (line, keep) in enumerate(zip(ids, kept, strict=True)):
        first = int(keep.argmax()) if keep.any() else len(line)
        gaps = np.flatnonzero(~keep[first:])
        end = first + int(gaps[0]) if gaps.size else len(line)
        items = [] if pictures is None else pictures.items[row]
        if items and items[-1].end > end:
            raise UnsupportedError("attention_mask leaves out tokens before an image")
        adapter = None if adapters is None else adapters[row]
        key = (first, line[first:].tobytes(), keep.tobytes(), adapter, *(item.key(first) for item in items))
        if key in found:
            found[key].rows.append(row)
        else:
            tokens = np.ascontiguousarray(line[first:end])
            found[key] = Prompt(f"generate-{next(_numbers)}", tokens, first, [row])
            found[key].adapter = adapter
            if items:
                found[key].items, found[key].pictures = items, pictures
    return list(found.values())


class Rows:
    """The requests of one call; `close` gives all their blocks back, whatever has happened.

    Args:
        store: Where KV is kept.
        extra_keys: What KV depends on besides tokens.
        salt: Whose blocks may be shared.
        lease: Of `store`, for the requests of the call.
    """

    def __init__(self, store: Store, extra_keys: tuple[Any, ...], salt: Any, lease: Lease) -> None:
        self.store = store
        self._extra_keys = extra_keys
        self._salt = salt
        # Not kept alive by what refers to itself in a circle: when the call is over it has to be gone at once.
        self._lease = weakref.proxy(lease)

    def admit(self, prompt: Prompt, reuse: bool = True) -> None:
        """Takes blocks for a prompt and finds what it has cached.

        Raises:
            OutOfBlocks: It does not fit.
        """
        store, size = self.store, self.store.block_size
        allocation = uninterrupted(self._allocate, prompt)
        spans = allocation.cached_spans
        length, cached = len(prompt.tokens), spans[0][1] if spans and spans[0][0] == 0 else 0
        whole = cached == length - 1 and allocation.slot_mapping[-1] < 0
        prompt.table = store.manager.block_table(prompt.request_id)
        prompt.written = length // size if whole else cached // size
        prompt.later = [span for span in spans if span[0] > cached] if reuse else []
        cached = prompt.readable(cached)
        if store.host is not None and reuse and not whole and not prompt.later:
            cached = prompt.readable(self._load(prompt, cached))
        prompt.waits = allocation.wait_for is not None
        prompt.cached = prompt.shared = cached if reuse else 0
        if store.states is None or not prompt.cached:
            return
        prompt.shared = prompt.cached // size * size
        prompt.cached, digests = 0, store.manager.block_hashes(prompt.request_id)
        for blocks in range(min(prompt.shared, length - 2) // size, 0, -1):
            prompt.states = store.states.get(digests[blocks - 1])
            if prompt.states is not None:
                prompt.cached = blocks * size
                return

    def _load(self, prompt: Prompt, cached: int) -> int:
        """Brings blocks back from host memory; how many tokens are cached by then."""
        store, block = self.store, cached // self.store.block_size
        digests = store.manager.block_hashes(prompt.request_id)
        while block < len(digests) and (content := store.host.get(digests[block])) is not None:
            place = BlockIds(prompt.table[block : block + 1])
            for index, (keys, values) in content.items():
                store.storage.write(index, place, keys, values)
            block += 1
        if block == prompt.written:
            return cached
        prompt.written = block
        uninterrupted(store.manager.commit, prompt.request_id, block * store.block_size)
        prompt.table = store.manager.block_table(prompt.request_id)
        return min(block * store.block_size, len(prompt.tokens) - 1)

    def readmit(self, prompt: Prompt) -> None:
        """Looks again for what is cached by now."""
        uninterrupted(self._lease.free, prompt.request_id)
        self.admit(prompt)

    def _allocate(self, prompt: Prompt) -> Any:
        self._lease.take(prompt.request_id)
        keys = self._extra_keys
        if self.store.heeds_padding and prompt.pad:
            keys = (*keys, "columns before it", str(prompt.pad))
        if prompt.adapter is not None:
            keys = (*keys, "adapter of the row", prompt.adapter)
        placed = [item.key(prompt.pad) for item in prompt.items]
        reuse = "prefix" if placed else self.store.reuse  # a gap's end may cut an image
        return self.store.manager.allocate(
            prompt.request_id, prompt.tokens, extra_keys=[*keys, *placed] or None, salt=self._salt, reuse=reuse
        )

    def write(self, prompt: Prompt, cache: DynamicCache, row: int, pad: int, length: int) -> None:
        """Writes the complete blocks among a prompt's first `length` tokens and makes them findable.

        Args:
            prompt: Whose blocks.
            cache: Where the tokens are, in `row` behind `pad` columns.
            row: See `cache`.
            pad: See `cache`.
            length: Tokens that the cache has of it, those that were read from blocks included.
        """
        length = min(length, len(prompt.tokens))
        last = length // self.store.block_size
        if last > prompt.written:  # between blocks there is nothing to publish
            for first, end in _between(prompt.later, self.store.block_size, prompt.written, last):
                self._write_blocks(prompt.table, cache, row, pad, first, end)
            prompt.written = last
            uninterrupted(self.store.manager.commit, prompt.request_id, length)

    def _write_blocks(self, table: np.ndarray, cache: DynamicCache, row: int, pad: int, first: int, last: int) -> None:
        size = self.store.block_size
        tokens, blocks = slice(pad + first * size, pad + last * size), BlockIds(table[first:last])
        for index, layer in attention_layers(cache).items():
            if index in self.store.storage.specs:
                keys, values = layer.keys[row, :, tokens], layer.values[row, :, tokens]
                self.store.storage.write(index, blocks, keys, values)

    def append(self, prompt: Prompt, cache: DynamicCache, answers: Sequence[np.ndarray]) -> None:
        """Keeps what was generated behind a prompt, up to the last complete block.

        Args:
            prompt: Its tokens reach up to the end of its row.
            cache: Where the keys and values of prompt and answers are.
            answers: Of each of the prompt's rows the generated tokens that the cache has.

        Raises:
            OutOfBlocks: There is no room; answers before it are kept.
        """
        size, length, manager = self.store.block_size, len(prompt.tokens), self.store.manager
        for number, (row, answer) in enumerate(zip(prompt.rows, answers, strict=True)):
            end = (length + len(answer)) // size * size
            if end <= length:
                continue
            request_id = prompt.request_id
            if len(prompt.rows) > 1:
                request_id = f"{request_id}-{number}"
                uninterrupted(self._fork, prompt.request_id, request_id)
            uninterrupted(manager.append, request_id, answer[: end - length])
            table = manager.block_table(request_id)
            self._write_blocks(table, cache, row, prompt.pad, length // size, end // size)
            uninterrupted(manager.commit, request_id, end)
            if request_id != prompt.request_id:
                uninterrupted(self._lease.free, request_id)

    def _fork(self, request_id: str, new_request_id: str) -> None:
        self._lease.take(new_request_id)
        self.store.manager.fork(request_id, new_request_id)

    def keep_states(self, prompt: Prompt, length: int, states: States, request_id: str | None = None) -> None:
        """Keeps the states behind a prompt's first `length` tokens, a whole number of blocks."""
        store = self.store
        if store.states is not None and length:
            digests = store.manager.block_hashes(request_id or prompt.request_id)
            store.states.put(digests[length // store.block_size - 1], states)

    def close(self) -> None:
        """Gives all blocks back; complete ones stay findable until they are evicted."""
        uninterrupted(self._lease.close)


def _between(spans: list[tuple[int, int]], size: int, first: int, last: int) -> list[tuple[int, int]]:
    """The runs of blocks from `first` to `last` that lie in none of the spans of tokens."""
    runs = []
    for start, end in [*spans, (last * size, last * size)]:
        if first < min(start // size, last):
            runs.append((first, min(start // size, last)))
        first = max(first, -(-end // size))
    return runs


__all__ = ["OutOfBlocks", "Prompt", "Rows", "prompts_of"]
