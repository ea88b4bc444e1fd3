"""The prompts of a batch as requests of the manager: what each has cached, and what goes from its cache to blocks."""

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
from ....cache.keys import Key
from ..store import Lease, uninterrupted
from .layers import States, window_layers
from .layout import write
from .moved import bring
from .prompts import Prompt
from .storage import Content
from .store import ContiguousStore


class PromptRequests:
    """The requests of one call with a lease of a store; `close` gives all blocks back, whatever has happened."""

    def __init__(
        self, store: ContiguousStore, extra_keys: tuple[Any, ...], salt: Key, lease: Lease, anywhere: bool = False
    ) -> None:
        # `anywhere`: whether text that is cached elsewhere is used.
        self.store, self._anywhere = store, anywhere
        self._extra_keys, self._salt = extra_keys, salt
        # Not kept alive by what refers to itself in a circle: when the call is over it has to be gone at once.
        self._lease = weakref.proxy(lease)
        self.full: OutOfBlocks | None = None  # raised where something was not kept
        self._commits: dict[str, int] = {}

    def admit(self, prompt: Prompt, reuse: bool = True, most: int | None = None) -> None:
        """Takes blocks for a prompt and finds `most` cached tokens at most; OutOfBlocks: it does not fit."""
        store, size, length = self.store, self.store.block_size, len(prompt.tokens)
        limit = length if store.states is None else max(length - 1, 1)  # states go on with two tokens at least
        limit = limit if most is None else min(limit, most + 1)
        kv_hit: int | None = None  # the longest hit of the attention layers alone, which states may not reach
        while True:
            allocation = uninterrupted(self._allocate, prompt, limit, most is None)
            spans = allocation.cached_spans
            cached = spans[0][1] if spans and spans[0][0] == 0 else 0
            kv_hit = kv_hit or allocation.junction
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
        prompt.approximate = allocation.approximate_from is not None
        prompt.moved = [(span.start, span.end) for span in allocation.moved]
        prompt.repaired = allocation.recompute_moved(store.recompute)
        if prompt.moved and store.moving is not None:
            bring(allocation, store.storage, store.moving.turns)
            prompt.borrowed = None
        prompt.waits = allocation.wait_for is not None
        prompt.states, prompt.closed = None, False
        if store.states is not None and cached and reuse:
            prompt.states = store.states.read(int(prompt.tables[store.storage.state_group][cached // size - 1]))
        cached = prompt.readable(cached)
        if store.evicted is not None and reuse and not whole and not prompt.later and not prompt.moved and most is None:
            cached = prompt.readable(self._bring_back(prompt, cached))
        prompt.cached = cached if reuse else 0
        prompt.shared = max(cached, kv_hit or 0) if reuse else 0

    def _bring_back(self, prompt: Prompt, cached: int) -> int:
        """Brings blocks behind an admitted prompt's back from host memory or disk; how many tokens it has then."""
        store, size, first, evicted = self.store, self.store.block_size, prompt.written, self.store.evicted
        assert evicted is not None
        digests = store.manager.block_hashes(prompt.request_id)
        found: list[list[Content]] = []
        for digest in digests[first:]:
            contents = [c for group, _ in store.storage.kv if (c := evicted.get(group, digest)) is not None]
            if len(contents) < len(store.storage.kv):
                break
            found.append(contents)
        states: Content | None = None
        while store.states is not None and found:
            end = (first + len(found)) * size
            if end <= len(prompt.tokens) - 2 and prompt.readable(end) == end:
                states = evicted.states(store.manager, digests[first + len(found) - 1])
            if states is not None:
                break
            found.pop()
        step = store.storage.chunk or len(found)
        for at in range(0, len(found), max(step, 1)):
            chunk = found[at : at + step]
            if not self.hold(prompt, prompt.tokens, (prompt.written + len(chunk)) * size):
                return cached if states is not None else prompt.written * size
            for block, contents in enumerate(chunk, prompt.written):
                for (group, part), content in zip(store.storage.kv, contents, strict=True):
                    part.put(int(prompt.tables[group][block]), content)
            prompt.written, prompt.borrowed = prompt.written + len(chunk), None
            if store.states is not None and states is not None and at + step >= len(found):
                prompt.states = store.states.of(states)
                self.keep_states(prompt, prompt.written * size, prompt.states)
            uninterrupted(store.manager.commit, prompt.request_id, prompt.written * size)
            prompt.tables = self.tables(prompt.request_id)
        return min(prompt.written * size, len(prompt.tokens) - 1) if found else cached

    def settle(self) -> None:
        """Publishes everything that is written, and releases blocks that others have too."""
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

    def _allocate(self, prompt: Prompt, limit: int, anywhere: bool) -> Any:
        self._lease.take(prompt.request_id)
        keys = self._extra_keys
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
        allocate = partial(self.store.manager.allocate, prompt.request_id, tokens, **options)
        if self.store.storage.chunk is None:
            return allocate()
        if reuse == "gap":  # what is behind a gap is found for tokens that have blocks
            with contextlib.suppress(OutOfBlocks):
                return allocate()
        return allocate(num_tokens=0)

    def publish(
        self,
        prompt: Prompt,
        cache: DynamicCache,
        row: int,
        pad: int,
        end: int,
        states: States | None = None,
        at_close: bool = False,
        tokens: np.ndarray | None = None,
    ) -> None:
        """Writes and commits the complete blocks among the first `end` tokens of a prompt, or of prompt and answer."""
        # `row` of the cache has them behind `pad` columns. In steps, where windows let their blocks be used again.
        # `states` are those behind `end`, to be kept. `at_close`: `close` commits, which saves a change of threads.
        tokens = prompt.tokens if tokens is None else tokens
        end = min(end, len(tokens))
        if end // self.store.block_size <= prompt.written and not states:  # between blocks there is nothing to publish
            return
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
                write(cache, self.store.storage, prompt.tables, row, pad, first, behind)
            prompt.written = max(last, prompt.written)
            if states is not None and at == end:
                self.keep_states(prompt, end, states)
            self._commits[prompt.request_id] = at
            if at < end or not at_close:
                uninterrupted(self._commit)

    def _commit(self) -> None:
        while self._commits:
            self.store.manager.commit(*self._commits.popitem())

    def keep_states(self, prompt: Prompt, length: int, states: States) -> None:
        """Keeps a checkpoint of recurrent states behind whole blocks, to be committed, if there is room."""
        store, block = self.store, length // self.store.block_size - 1
        if store.states is not None and prompt.tables[store.storage.state_group][block] < 0:
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
        """Keeps the complete blocks of what each row has generated behind a prompt up to the end of its row."""
        # `states` by row: behind so many tokens, where that is within the answer. `last`: the answers are whole.
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
            self.publish(branch, cache, row, prompt.pad, end, at_close=last, tokens=tokens)
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
        """Gives all blocks back; complete ones stay published until they are evicted."""
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
