"""The prompts of a call as requests of the manager: what each has cached, and what goes from its cache to blocks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import numpy as np
from transformers import DynamicCache

from ....cache import OutOfBlocks
from ..store import Lease
from ..support import Loop
from .layers import States, window_layers
from .layout import write
from .moved import bring
from .prompts import Hit, Prompt
from .storage import Content
from .store import ContiguousStore


class RequestBlocks:
    """The blocks of one request, and how far they are filled."""

    def __init__(self, store: ContiguousStore, request_id: str) -> None:
        self.store, self.request_id = store, request_id
        self.held = 0  # tokens that have blocks
        self.written = 0  # blocks whose content is there
        self.borrowed: int | None = None  # the block of another within which the cached tokens end, where they do
        self.closed = False  # whether nothing more goes to blocks
        self.full: OutOfBlocks | None = None  # raised where something was not kept
        self.tables: list[np.ndarray] = []  # of each group, as of the latest change

    @property
    def settled(self) -> int:
        """Tokens that may be committed: whole blocks of them are written."""
        return min(self.held, (self.written + 1) * self.store.block_size - 1)

    def look(self) -> None:
        """Reads the block tables."""
        manager = self.store.manager
        self.tables = [manager.block_table(self.request_id, group) for group in range(len(manager.groups))]

    def read_from(self, group: int, first: int, length: int) -> np.ndarray:
        """The blocks of a group from `first` on from which the first `length` tokens are read."""
        blocks: np.ndarray = self.tables[group][first : -(-length // self.store.block_size)]
        if self.borrowed is not None and first + len(blocks) > self.written:
            blocks = blocks.copy()
            blocks[self.written - first] = self.borrowed
        return blocks

    def serves(self, length: int) -> bool:
        """Whether computing goes on behind the first `length` tokens."""
        size = self.store.block_size
        for group, _ in self.store.storage.kv:
            needed = self.store.storage.groups[group].needed(length, -(-length // size), size)
            if (self.tables[group][needed] < 0).any():
                return False
        return True

    def hold(self, tokens: np.ndarray, end: int) -> bool:
        """Takes blocks for tokens up to `end` that have none; whether there was room."""
        if end > self.held:
            try:
                self.store.manager.append(self.request_id, tokens[self.held : end])
            except OutOfBlocks as error:
                self.full, self.closed = error, True
                return False
            self.held = end
            self.look()
        return True

    def commit(self, num_tokens: int) -> None:
        """Publishes the complete blocks of so many tokens; those that others had first take their places."""
        self.store.manager.commit(self.request_id, num_tokens)
        self.look()

    def publish(
        self,
        cache: DynamicCache,
        row: int,
        pad: int,
        tokens: np.ndarray,
        end: int,
        states: States | None = None,
        skip: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Writes and commits the complete blocks among the first `end` tokens, but for spans that were read."""
        # `row` of the cache has them behind `pad` columns. In steps, where windows let their blocks be used again.
        # `states` are those behind `end`, to be kept.
        size, chunk, end = self.store.block_size, self.store.storage.chunk, min(end, len(tokens))
        if end // size <= self.written and not states:  # between blocks there is nothing to publish
            return
        gone = max((layer.first for layer in window_layers(cache)), default=0)
        self.closed |= gone > pad + self.written * size
        at = min(self.written * size, end - 1)
        while not self.closed and at < end:
            at = end if chunk is None else min(end, at + chunk * size)
            if not self.hold(tokens, at):
                return
            last = at // size
            for first, behind in _between(skip, size, self.written, last):
                write(cache, self.store.storage, self.tables, row, pad, first, behind)
            self.written = max(last, self.written)
            if states is not None and at == end:
                self.keep_states(end, states)
            self.commit(at)

    def keep_states(self, length: int, states: States) -> None:
        """Keeps a checkpoint of recurrent states behind whole blocks if there is room; the next commit publishes it."""
        store, block = self.store, length // self.store.block_size - 1
        if store.states is not None and self.tables[store.storage.state_group][block] < 0:
            with contextlib.suppress(OutOfBlocks):
                # Nothing commits once an interrupt has come between: what is half written is not found.
                store.states.write(store.manager.checkpoint(self.request_id, length), states)


class PromptRequests:
    """The requests of one call with a lease of a store; `close` gives all blocks back, whatever has happened."""

    def __init__(self, store: ContiguousStore, loop: Loop, lease: Lease, anywhere: bool = False) -> None:
        # `anywhere`: whether text that is cached elsewhere is used.
        self.store, self._anywhere = store, anywhere
        self._keys, self._salt = loop.keys, loop.salt
        # Not kept alive by what refers to itself in a circle: when the call is over it has to be gone at once.
        self._lease = weakref.proxy(lease)

    def admit(self, prompt: Prompt, reuse: bool = True, most: int | None = None) -> None:
        """Takes blocks for a prompt and finds `most` cached tokens at most; OutOfBlocks: it does not fit."""
        store, length = self.store, len(prompt.tokens)
        limit = length if store.states is None else max(length - 1, 1)  # states go on with two tokens at least
        limit = limit if most is None else min(limit, most + 1)
        kv_hit: int | None = None  # the longest hit of the attention layers alone, which states may not reach
        while True:
            allocation = self._allocate(prompt, limit, anywhere=most is None)
            spans = allocation.cached_spans
            cached = spans[0][1] if spans and spans[0][0] == 0 else 0
            kv_hit = kv_hit or allocation.junction
            if store.storage.simple or prompt.readable(cached) == cached:
                break
            limit = prompt.readable(cached) + 1  # states, or windows, are there for other places only
            self._lease.free(prompt.request_id)
        whole = cached == limit - 1 and (allocation.group_slot_mapping(0)[-1:] < 0).any()
        prompt.allocation, prompt.blocks = allocation, RequestBlocks(store, prompt.request_id)
        blocks = prompt.blocks
        blocks.held = limit if store.storage.chunk is None else store.manager.num_tokens(prompt.request_id)
        blocks.written = (limit if whole else cached) // store.block_size
        blocks.look()
        later = [span for span in spans if span[0] > cached] if reuse else []
        if allocation.moved and store.moving is not None:
            bring(allocation, store.storage, store.moving.turns)
        elif copies := allocation.group_copies(0):
            blocks.borrowed = copies[0][0]
        states = None
        if store.states is not None and cached and reuse:
            table = blocks.tables[store.storage.state_group]
            states = store.states.read(int(table[cached // store.block_size - 1]))
        cached = prompt.readable(cached)
        if store.evicted is not None and reuse and not (whole or later or allocation.moved) and most is None:
            cached, states = self._bring_back(prompt, cached, states)
            cached = prompt.readable(cached)
        moved = [(span.start, span.end) for span in allocation.moved]
        repaired = allocation.recompute_moved(store.recompute)
        prompt.hit = Hit(cached, later, moved, repaired, states, max(cached, kv_hit or 0)) if reuse else Hit()

    def _bring_back(self, prompt: Prompt, cached: int, states: States | None) -> tuple[int, States | None]:
        """Brings blocks behind an admitted prompt's back from host memory or disk; what it has then."""
        store, blocks, evicted = self.store, prompt.blocks, self.store.evicted
        assert evicted is not None
        size, first = store.block_size, blocks.written
        digests = store.manager.block_hashes(prompt.request_id)
        found: list[list[Content]] = []
        for digest in digests[first:]:
            contents = [c for group, _ in store.storage.kv if (c := evicted.get(group, digest)) is not None]
            if len(contents) < len(store.storage.kv):
                break
            found.append(contents)
        kept: Content | None = None
        while store.states is not None and found:
            end = (first + len(found)) * size
            if end <= len(prompt.tokens) - 2 and prompt.readable(end) == end:
                kept = evicted.states(store.manager, digests[first + len(found) - 1])
            if kept is not None:
                break
            found.pop()
        step = store.storage.chunk or len(found)
        for at in range(0, len(found), max(step, 1)):
            chunk = found[at : at + step]
            if not blocks.hold(prompt.tokens, (blocks.written + len(chunk)) * size):
                return (cached if kept is not None else blocks.written * size), states
            for block, contents in enumerate(chunk, blocks.written):
                for (group, part), content in zip(store.storage.kv, contents, strict=True):
                    part.put(int(blocks.tables[group][block]), content)
            blocks.written, blocks.borrowed = blocks.written + len(chunk), None
            if store.states is not None and kept is not None and at + step >= len(found):
                states = store.states.of(kept)
                blocks.keep_states(blocks.written * size, states)
            blocks.commit(blocks.written * size)
        return (min(blocks.written * size, len(prompt.tokens) - 1) if found else cached), states

    def readmit(self, prompt: Prompt, most: int | None = None) -> None:
        """Looks again for what is cached by now; `most`: see `admit`."""
        self._lease.free(prompt.request_id)
        self.admit(prompt, most=most)

    def _allocate(self, prompt: Prompt, limit: int, anywhere: bool) -> Any:
        self._lease.take(prompt.request_id)
        manager, keys = self.store.manager, self._keys
        if self.store.counts_padding and prompt.pad:
            keys = (*keys, "columns before it", str(prompt.pad))
        if prompt.adapter is not None:
            keys = (*keys, "adapter of the row", prompt.adapter)
        placed = [item.key(prompt.pad) for item in prompt.items]
        reuse = "prefix" if placed else self.store.reuse  # a gap's end may cut an image
        if reuse == "anywhere" and not (anywhere and self._anywhere):
            reuse = "prefix"
        tokens = prompt.tokens if limit == len(prompt.tokens) else prompt.tokens[:limit]
        options: dict[str, Any] = {"extra_keys": [*keys, *placed] or None, "salt": self._salt, "reuse": reuse}
        if self.store.storage.chunk is None:
            return manager.allocate(prompt.request_id, tokens, **options)
        if reuse == "gap":  # what is behind a gap is found for tokens that have blocks
            with contextlib.suppress(OutOfBlocks):
                return manager.allocate(prompt.request_id, tokens, **options)
        return manager.allocate(prompt.request_id, tokens, num_tokens=0, **options)

    def fork(self, prompt: Prompt, row: int) -> RequestBlocks:
        """The blocks of one of a prompt's rows, which share those of the prompt."""
        branch = copy(prompt.blocks)
        branch.request_id = f"{prompt.request_id}-{row}"
        prompt.blocks.commit(min(len(prompt.tokens), branch.settled))
        self._lease.take(branch.request_id)
        self.store.manager.fork(prompt.request_id, branch.request_id)
        prompt.branches[row] = branch
        return branch

    def end(self, branch: RequestBlocks) -> None:
        """Ends a row's own request."""
        self._lease.free(branch.request_id)

    def close(self) -> None:
        """Gives all blocks back; complete ones stay published until they are evicted."""
        self._lease.close()


def _between(spans: Iterable[tuple[int, int]], size: int, first: int, last: int) -> list[tuple[int, int]]:
    """The runs of blocks from `first` to `last` that lie in none of the spans of tokens."""
    runs = []
    for start, end in [*spans, (last * size, last * size)]:
        if first < min(start // size, last):
            runs.append((first, min(start // size, last)))
        first = max(first, -(-end // size))
    return runs
