"""Rows of a batch as requests of the manager: what each of them has cached, and what its cache is written to."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ....cache import OutOfBlocks
from ..store import Lease, Store
from ..support import UnsupportedError
from ..uninterrupted import uninterrupted
from .pictures import Item, Pictures, clear_of
from .states import States
from .storage import BlockIds, Content

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
        held: Tokens that have blocks.
        written: Blocks whose content is there.
        borrowed: Where its first tokens end within a block of another prompt: that block; None where they do not.
        later: Spans behind the first missing block that are read from blocks too.
        waits: Whether somebody is computing its next block at this moment.
        tables: The block table of each group.
        states: At the end of the cached tokens; None where there are none.
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
    held: int = 0
    written: int = 0
    borrowed: int | None = None
    waits: bool = False
    later: list[tuple[int, int]] = field(default_factory=list)
    tables: list[np.ndarray] = field(default_factory=list)
    states: States | None = None
    items: list[Item] = field(default_factory=list)
    adapter: str | None = None
    pictures: Pictures | None = None

    def blocks(self, group: int, length: int, size: int) -> np.ndarray:
        """The blocks of a group from which its first tokens are read."""
        blocks: np.ndarray = self.tables[group][: -(-length // size)]
        if self.borrowed is not None and len(blocks) > self.written:
            blocks = blocks.copy()
            blocks[self.written] = self.borrowed
        return blocks

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
    if mask is None and len(ids) == 1 and pictures is None and adapters is None:
        return [Prompt(f"generate-{next(_numbers)}", np.ascontiguousarray(ids[0]), 0, [0])]
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
        self._commits: dict[str, int] = {}

    def admit(self, prompt: Prompt, reuse: bool = True) -> None:
        """Takes blocks for a prompt and finds what it has cached.

        Raises:
            OutOfBlocks: It does not fit.
        """
        store, size, length = self.store, self.store.block_size, len(prompt.tokens)
        junction: int | None = None
        prompt.held = length if store.states is None else max(length - 1, 1)  # states go on with two tokens at least
        while True:
            allocation = uninterrupted(self._allocate, prompt)
            spans = allocation.cached_spans
            cached = spans[0][1] if spans and spans[0][0] == 0 else 0
            junction = junction or allocation.junction
            if store.states is None or prompt.readable(cached) == cached:
                break
            prompt.held = prompt.readable(cached) + 1  # there are no states where it is cut: the boundary before
            uninterrupted(self._lease.free, prompt.request_id)
        whole = cached == prompt.held - 1 and allocation.group_slot_mapping(0)[-1] < 0
        prompt.tables = self._tables(prompt.request_id)
        prompt.written = prompt.held // size if whole else cached // size
        copies = allocation.group_copies(0)
        prompt.borrowed = copies[0][0] if copies else None
        prompt.later = [span for span in spans if span[0] > cached] if reuse else []
        prompt.waits = allocation.wait_for is not None
        prompt.states = None
        if store.states is not None and cached and reuse:
            prompt.states = store.states.read(int(prompt.tables[store.storage.state_group][cached // size - 1]))
        cached = prompt.readable(cached)
        if store.host is not None and reuse and not whole and not prompt.later:
            cached = prompt.readable(self._bring_back(prompt, cached))
        prompt.cached = cached if reuse else 0
        prompt.shared = max(cached, junction or 0) if reuse else 0

    def _bring_back(self, prompt: Prompt, cached: int) -> int:
        """Brings blocks back from host memory; how many tokens are cached by then."""
        store, first = self.store, cached // self.store.block_size
        digests = store.manager.block_hashes(prompt.request_id)
        found: list[list[Content]] = []
        for digest in digests[first:]:
            contents = [store.host.get(group, digest) for group, _ in store.storage.kv]
            if any(content is None for content in contents):
                break
            found.append(contents)
        states: Content | None = None
        while store.states is not None and found:
            end = (first + len(found)) * store.block_size
            if end <= len(prompt.tokens) - 2 and prompt.readable(end) == end:
                states = self._kept_states(digests[first + len(found) - 1])
            if states is not None:
                break
            found.pop()
        if not found:
            return cached
        for block, contents in enumerate(found, first):
            for (group, part), content in zip(store.storage.kv, contents, strict=True):
                part.put(int(prompt.tables[group][block]), content)
        prompt.written, prompt.borrowed = first + len(found), None
        if states is not None:
            prompt.states = store.states.of(states)
            self._keep_states(prompt, prompt.written * store.block_size, prompt.states)
        uninterrupted(store.manager.commit, prompt.request_id, prompt.written * store.block_size)
        prompt.tables = self._tables(prompt.request_id)
        return min(prompt.written * store.block_size, len(prompt.tokens) - 1)

    def _kept_states(self, digest: bytes) -> Content | None:
        """The states behind a block from host memory, or from a block that nobody has overwritten meanwhile."""
        store, group = self.store, self.store.storage.state_group
        pool = store.manager.pools[group]
        block = int(pool.table.find(np.frombuffer(digest, np.uint64)[None])[0])
        if block >= 0:
            taken = pool.taken_at[block]
            content: Content = store.storage.content(group, block)
            if pool.taken_at[block] == taken and pool.table.lists(block):
                return content
        kept: Content | None = store.host.get(group, digest)
        return kept

    def _tables(self, request_id: str) -> list[np.ndarray]:
        manager = self.store.manager
        return [manager.block_table(request_id, group) for group in range(len(manager.groups))]

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
        tokens = prompt.tokens if prompt.held == len(prompt.tokens) else prompt.tokens[: prompt.held]
        return self.store.manager.allocate(
            prompt.request_id, tokens, extra_keys=[*keys, *placed] or None, salt=self._salt, reuse=reuse
        )

    def write(
        self,
        prompt: Prompt,
        cache: DynamicCache,
        row: int,
        pad: int,
        length: int,
        states: States | None = None,
        at_close: bool = False,
    ) -> None:
        """Writes the complete blocks among a prompt's first `length` tokens and makes them findable.

        Args:
            prompt: Whose blocks.
            cache: Where the tokens are, in `row` behind `pad` columns.
            row: See `cache`.
            pad: See `cache`.
            length: Tokens that the cache has of it, those that were read from blocks included.
            states: Behind them, where they end a block and are to be kept.
            at_close: Whether they are found from `close` on, which saves a change of threads.

        Raises:
            OutOfBlocks: There is no room for tokens that had no blocks yet.
        """
        length = min(length, len(prompt.tokens))
        if length // self.store.block_size > prompt.written or states:  # between blocks there is nothing to publish
            self._extend(prompt, prompt.tokens, cache, row, pad, length, states, at_close)

    def _extend(
        self,
        prompt: Prompt,
        tokens: np.ndarray,
        cache: DynamicCache,
        row: int,
        pad: int,
        end: int,
        states: States | None = None,
        at_close: bool = False,
    ) -> None:
        manager, size = self.store.manager, self.store.block_size
        if end > prompt.held:
            uninterrupted(manager.append, prompt.request_id, tokens[prompt.held : end])
            prompt.held, prompt.tables = end, self._tables(prompt.request_id)
        last = end // size
        for first, behind in _between(prompt.later, size, prompt.written, last):
            self._write_blocks(prompt.tables, cache, row, pad, first, behind)
        prompt.written = max(last, prompt.written)
        if states is not None:
            self._keep_states(prompt, end, states)
        self._commits[prompt.request_id] = end
        if not at_close:
            uninterrupted(self._commit)

    def _commit(self) -> None:
        while self._commits:
            self.store.manager.commit(*self._commits.popitem())

    def _write_blocks(
        self, tables: list[np.ndarray], cache: DynamicCache, row: int, pad: int, first: int, last: int
    ) -> None:
        size = self.store.block_size
        tokens = slice(pad + first * size, pad + last * size)
        for group, part in self.store.storage.kv:
            blocks = BlockIds(tables[group][first:last])
            for index in part.specs:
                layer = cache.layers[index]
                part.write(index, blocks, layer.keys[row, :, tokens], layer.values[row, :, tokens])

    def _keep_states(self, prompt: Prompt, length: int, states: States) -> None:
        """Keeps states behind a whole number of blocks; to be committed. Where all blocks of states are held, not."""
        store, block = self.store, length // self.store.block_size - 1
        if prompt.tables[store.storage.state_group][block] < 0:
            try:
                target = uninterrupted(store.manager.checkpoint, prompt.request_id, length)
            except OutOfBlocks:
                return
            store.states.write(target, states)

    def append(
        self,
        prompt: Prompt,
        cache: DynamicCache,
        answers: Sequence[np.ndarray],
        states: Mapping[int, tuple[int, States]] = MappingProxyType({}),
    ) -> None:
        """Keeps what was generated behind a prompt, up to the last complete block.

        Args:
            prompt: Its tokens reach up to the end of its row.
            cache: Where the keys and values of prompt and answers are.
            answers: Of each of the prompt's rows the generated tokens that the cache has.
            states: By row, where one was within its answer: behind so many tokens.

        Raises:
            OutOfBlocks: There is no room; answers before it are kept.
        """
        size, length, manager = self.store.block_size, len(prompt.tokens), self.store.manager
        for number, (row, answer) in enumerate(zip(prompt.rows, answers, strict=True)):
            end = (length + len(answer)) // size * size
            if end <= length:
                continue
            branch = prompt
            if len(prompt.rows) > 1:
                branch = replace(prompt, request_id=f"{prompt.request_id}-{number}")
                uninterrupted(manager.commit, prompt.request_id, min(length, prompt.held))
                uninterrupted(self._fork, prompt.request_id, branch.request_id)
            tokens = np.concatenate((prompt.tokens, answer))
            self._extend(branch, tokens, cache, row, prompt.pad, end, at_close=True)
            boundary, kept = states.get(row, (0, None))
            if kept is not None and boundary <= end:
                self._keep_states(branch, boundary, kept)
            if branch is not prompt:
                uninterrupted(self._commit)
                uninterrupted(self._lease.free, branch.request_id)

    def _fork(self, request_id: str, new_request_id: str) -> None:
        self._commit()
        self._lease.take(new_request_id)
        self.store.manager.fork(request_id, new_request_id)

    def close(self) -> None:
        """Gives all blocks back; complete ones stay findable until they are evicted."""
        uninterrupted(self._close)

    def _close(self) -> None:
        try:
            self._commit()
        finally:
            self._lease.close()


def _between(spans: list[tuple[int, int]], size: int, first: int, last: int) -> list[tuple[int, int]]:
    """The runs of blocks from `first` to `last` that lie in none of the spans of tokens."""
    runs = []
    for start, end in [*spans, (last * size, last * size)]:
        if first < min(start // size, last):
            runs.append((first, min(start // size, last)))
        first = max(first, -(-end // size))
    return runs


__all__ = ["OutOfBlocks", "Prompt", "Rows", "prompts_of"]
