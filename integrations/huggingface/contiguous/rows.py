"""Rows of a batch as requests of the manager: what each of them has cached, and what its cache is written to."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import DynamicCache

from ....cache import OutOfBlocks
from ..store import Lease, Store
from ..uninterrupted import uninterrupted
from .layers import attention_layers, window_layers
from .prompts import Prompt
from .returned import bring_back
from .states import States
from .storage import BlockIds


class Rows:
    """The requests of one call; `close` gives all their blocks back, whatever has happened.

    Args:
        store: Where KV is kept.
        extra_keys: What KV depends on besides tokens.
        salt: Whose blocks may be shared.
        lease: Of `store`, for the requests of the call.

    Attributes:
        full: Raised where something was not kept; None where all was.
    """

    def __init__(self, store: Store, extra_keys: tuple[Any, ...], salt: Any, lease: Lease) -> None:
        self.store = store
        self._extra_keys = extra_keys
        self._salt = salt
        # Not kept alive by what refers to itself in a circle: when the call is over it has to be gone at once.
        self._lease = weakref.proxy(lease)
        self.full: OutOfBlocks | None = None
        self._commits: dict[str, int] = {}

    def admit(self, prompt: Prompt, reuse: bool = True, most: int | None = None) -> None:
        """Takes blocks for a prompt and finds what it has cached.

        Args:
            prompt: The prompt.
            reuse: Whether that is read.
            most: Tokens that are read at most; None: all there are.

        Raises:
            OutOfBlocks: It does not fit.
        """
        store, size, length = self.store, self.store.block_size, len(prompt.tokens)
        limit = length if store.states is None else max(length - 1, 1)  # states go on with two tokens at least
        limit = limit if most is None else min(limit, most + 1)
        junction: int | None = None
        while True:
            allocation = uninterrupted(self._allocate, prompt, limit)
            spans = allocation.cached_spans
            cached = spans[0][1] if spans and spans[0][0] == 0 else 0
            junction = junction or allocation.junction
            if store.storage.simple or prompt.readable(cached) == cached:
                break
            limit = prompt.readable(cached) + 1  # states, or windows, are there for other places only
            uninterrupted(self._lease.free, prompt.request_id)
        whole = cached == limit - 1 and (allocation.group_slot_mapping(0)[-1:] < 0).any()
        prompt.held = limit if store.storage.chunk is None else store.manager.num_tokens(prompt.request_id)
        prompt.tables = self.tables(prompt.request_id)
        prompt.written = limit // size if whole else cached // size
        copies = allocation.group_copies(0)
        prompt.borrowed = copies[0][0] if copies else None
        prompt.later = [span for span in spans if span[0] > cached] if reuse else []
        prompt.waits = allocation.wait_for is not None
        prompt.states, prompt.closed = None, False
        if store.states is not None and cached and reuse:
            prompt.states = store.states.read(int(prompt.tables[store.storage.state_group][cached // size - 1]))
        cached = prompt.readable(cached)
        if store.host is not None and reuse and not whole and not prompt.later and most is None:
            cached = prompt.readable(bring_back(self, prompt, cached))
        prompt.cached = cached if reuse else 0
        prompt.shared = max(cached, junction or 0) if reuse else 0

    def settle(self) -> None:
        """Makes everything findable that is written, and gives up blocks that others have too."""
        uninterrupted(self._commit)

    def tables(self, request_id: str) -> list[np.ndarray]:
        """The block table of each group, as of the last commit."""
        manager = self.store.manager
        return [manager.block_table(request_id, group) for group in range(len(manager.groups))]

    def hold(self, prompt: Prompt, tokens: np.ndarray, end: int) -> bool:
        """Takes blocks for tokens up to `end` that have none; whether there was room."""
        if end > prompt.held:
            try:
                uninterrupted(self.store.manager.append, prompt.request_id, tokens[prompt.held : end])
            except OutOfBlocks as error:
                self.full, prompt.closed = error, True
                return False
            prompt.held, prompt.tables = end, self.tables(prompt.request_id)
        return True

    def serves(self, prompt: Prompt, length: int) -> bool:
        """Whether the blocks of a prompt let computing go on behind its first `length` tokens."""
        size = self.store.block_size
        for group, _ in self.store.storage.kv:
            needed = self.store.storage.groups[group].needed(length, -(-length // size), size)
            if (prompt.tables[group][needed] < 0).any():
                return False
        return True

    def readmit(self, prompt: Prompt, most: int | None = None) -> None:
        """Looks again for what is cached by now; `most`: see `admit`."""
        uninterrupted(self._lease.free, prompt.request_id)
        self.admit(prompt, most=most)

    def _allocate(self, prompt: Prompt, limit: int) -> Any:
        self._lease.take(prompt.request_id)
        keys = self._extra_keys
        if self.store.heeds_padding and prompt.pad:
            keys = (*keys, "columns before it", str(prompt.pad))
        if prompt.adapter is not None:
            keys = (*keys, "adapter of the row", prompt.adapter)
        placed = [item.key(prompt.pad) for item in prompt.items]
        reuse = "prefix" if placed else self.store.reuse  # a gap's end may cut an image
        tokens = prompt.tokens if limit == len(prompt.tokens) else prompt.tokens[:limit]
        allocate = partial(
            self.store.manager.allocate,
            prompt.request_id,
            tokens,
            extra_keys=[*keys, *placed] or None,
            salt=self._salt,
            reuse=reuse,
        )
        if self.store.storage.chunk is None:
            return allocate()
        if reuse == "gap":  # what is behind a gap is found for tokens that have blocks
            with contextlib.suppress(OutOfBlocks):
                return allocate()
        return allocate(num_tokens=0)

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
        """Writes blocks up to `end` and commits them, in steps that let a window's blocks be used again."""
        size, chunk = self.store.block_size, self.store.storage.chunk
        gone = max((layer.first for layer in window_layers(cache)), default=0)
        prompt.closed |= gone > pad + prompt.written * size
        at = min(prompt.written * size, end - 1)
        while not prompt.closed and at < end:
            at = end if chunk is None else min(end, at + chunk * size)
            if not self.hold(prompt, tokens, at):
                return
            last = at // size
            for first, behind in _between(prompt.later, size, prompt.written, last):
                self._write_blocks(prompt.tables, cache, row, pad, first, behind)
            prompt.written = max(last, prompt.written)
            if states is not None and at == end:
                self.keep_states(prompt, end, states)
            self._commits[prompt.request_id] = at
            if at < end or not at_close:
                uninterrupted(self._commit)

    def _commit(self) -> None:
        while self._commits:
            self.store.manager.commit(*self._commits.popitem())

    def _write_blocks(
        self, tables: list[np.ndarray], cache: DynamicCache, row: int, pad: int, first: int, last: int
    ) -> None:
        size, layers = self.store.block_size, attention_layers(cache)
        for group, part in self.store.storage.kv:
            blocks = BlockIds(tables[group][first:last])
            for index in part.specs:
                layer = layers[index]
                begin = pad - getattr(layer, "first", 0)
                tokens = slice(begin + first * size, begin + last * size)
                part.write(index, blocks, layer.keys[row, :, tokens], layer.values[row, :, tokens])

    def keep_states(self, prompt: Prompt, length: int, states: States) -> None:
        """Keeps states behind a whole number of blocks; to be committed. Where all blocks of states are held, not."""
        store, block = self.store, length // self.store.block_size - 1
        if prompt.tables[store.storage.state_group][block] < 0:
            uninterrupted(self._commit)  # not between these lines: what an interrupt leaves half written is not found
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
        last: bool = True,
    ) -> None:
        """Keeps what was generated behind a prompt, up to the last complete block.

        Args:
            prompt: Its tokens reach up to the end of its row.
            cache: Where the keys and values of prompt and answers are.
            answers: Of each of the prompt's rows the generated tokens that the cache has.
            states: By row, where one was within its answer: behind so many tokens.
            last: Whether the answers are whole.
        """
        size, length = self.store.block_size, len(prompt.tokens)
        for number, (row, answer) in enumerate(zip(prompt.rows, answers, strict=True)):
            end = (length + len(answer)) // size * size
            branch = prompt.branches.get(row, prompt)
            if end <= max(length, branch.written * size) or branch.closed:
                continue
            if branch is prompt and len(prompt.rows) > 1:
                branch = replace(prompt, request_id=f"{prompt.request_id}-{number}")
                self._commits[prompt.request_id] = min(length, prompt.settled(size))
                uninterrupted(self._fork, prompt.request_id, branch.request_id)
                prompt.branches[row] = branch
            tokens = np.concatenate((prompt.tokens, answer))
            self._extend(branch, tokens, cache, row, prompt.pad, end, at_close=last)
            boundary, kept = states.get(row, (0, None))
            if kept is not None and boundary <= branch.written * size:
                self.keep_states(branch, boundary, kept)
                self._commits[branch.request_id] = branch.settled(size)
            if last and branch is not prompt:
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
