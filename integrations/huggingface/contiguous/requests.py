"""The prompts of a call as requests of the manager: what each has cached, and what goes from its cache to blocks."""

from __future__ import annotations

import contextlib
import weakref
from copy import copy
from functools import partial
from itertools import takewhile
from typing import Any

from ....cache import OutOfBlocks
from ..store import Lease
from ..support import Loop
from .blocks import RequestBlocks
from .layers import States
from .moved import bring
from .prompts import Prompt, Reused
from .storage import Content
from .store import ContiguousStore


def extra_keys(store: ContiguousStore, keys: tuple[Any, ...], prompt: Prompt) -> list[Any] | None:
    """What the KV of a prompt depends on besides its tokens; `keys` are those of its call."""
    if store.counts_padding and prompt.pad:
        keys = (*keys, "columns before it", str(prompt.pad))
    if prompt.adapter is not None:
        keys = (*keys, "adapter of the row", prompt.adapter)
    return [*keys, *prompt.image_keys()] or None


class PromptRequests:
    """The requests of one call with a lease of a store; `close` gives all blocks back, whatever has happened."""

    def __init__(self, store: ContiguousStore, loop: Loop, lease: Lease, anywhere: bool = False) -> None:
        # `anywhere`: whether text that is cached elsewhere is used.
        self.store, self._anywhere = store, anywhere
        self._keys, self._salt = loop.keys, loop.salt
        # Not kept alive by what refers to itself in a circle: when the call is over it has to be gone at once.
        self._lease = weakref.proxy(lease)

    def blocks(self, prompt: Prompt) -> RequestBlocks:
        """Return the blocks of a prompt that has none yet."""
        return RequestBlocks(self._lease, self.store.storage, prompt.request_id)

    def admit(self, prompt: Prompt, reuse: bool = True, most: int | None = None) -> None:
        """Takes blocks for a prompt and finds `most` cached tokens at most; OutOfBlocks: it does not fit."""
        store, length = self.store, len(prompt.tokens)
        limit = length if store.states is None else max(length - 1, 1)  # states go on with two tokens at least
        limit = limit if most is None else min(limit, most + 1)
        attention_hit: int | None = None  # the longest hit of the attention layers alone, which states may not reach
        while True:
            allocation = self._allocate(prompt, limit, anywhere=most is None)
            spans = allocation.cached_spans
            cached = spans[0][1] if spans and spans[0][0] == 0 else 0
            attention_hit = attention_hit or allocation.junction
            if store.storage.simple or prompt.readable(cached) == cached:
                break
            limit = prompt.readable(cached) + 1  # states, or windows, are there for other places only
            self._lease.free(prompt.request_id)
        whole = cached == limit - 1 and (allocation.group_slot_mapping(0)[-1:] < 0).any()
        prompt.allocation, prompt.blocks = allocation, self.blocks(prompt)
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
        prompt.reused = (
            Reused(cached, later, moved, repaired, states, max(cached, attention_hit or 0)) if reuse else Reused()
        )

    def _bring_back(self, prompt: Prompt, cached: int, states: States | None) -> tuple[int, States | None]:
        """Brings blocks behind an admitted prompt's back, cached ones behind a gap too; what it has then."""
        store, blocks, evicted = self.store, prompt.blocks, self.store.evicted
        assert evicted is not None
        size = store.block_size
        found, kept = self._found_below(prompt, blocks.written)
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

    def _found_below(self, prompt: Prompt, first: int) -> tuple[list[list[Content]], Content | None]:
        """KV of blocks from `first` on that are cached or in a tier, and recurrent states behind the last of them.

        Where a model has states, KV is read only as far as there are some.
        """
        store, evicted = self.store, self.store.evicted
        assert evicted is not None
        groups = [group for group, _ in store.storage.kv]
        digests = store.manager.block_hashes(prompt.request_id)[first:]
        has, content = partial(evicted.has, store.manager), partial(evicted.content, store.manager)
        found: list[list[Content]] = []
        kept: Content | None = None
        count = len(digests)
        if store.states is not None:
            there = (all(has(group, digest) for group in groups) for digest in digests)
            count = sum(takewhile(bool, there))
        while True:
            while store.states is not None and count:
                end = (first + count) * store.block_size
                if end <= len(prompt.tokens) - 2 and prompt.readable(end) == end:
                    kept = content(store.storage.state_group, digests[count - 1])
                if kept is not None:
                    break
                count -= 1
            for digest in digests[len(found) : count]:
                contents = [c for group in groups if (c := content(group, digest)) is not None]
                if len(contents) < len(groups):
                    break
                found.append(contents)
            if store.states is None or len(found) >= count:
                return found[:count], kept
            count, kept = len(found), None  # a tier may lose what it had

    def readmit(self, prompt: Prompt, most: int | None = None) -> None:
        """Looks again for what is cached by now; `most`: see `admit`."""
        self._lease.free(prompt.request_id)
        self.admit(prompt, most=most)

    def _allocate(self, prompt: Prompt, limit: int, anywhere: bool) -> Any:
        self._lease.take(prompt.request_id)
        manager, keys = self.store.manager, extra_keys(self.store, self._keys, prompt)
        reuse = "prefix" if prompt.items else self.store.reuse  # a gap's end may cut an image
        if reuse == "anywhere" and not (anywhere and self._anywhere):
            reuse = "prefix"
        tokens = prompt.tokens if limit == len(prompt.tokens) else prompt.tokens[:limit]
        options: dict[str, Any] = {"extra_keys": keys, "salt": self._salt, "reuse": reuse}
        if self.store.storage.chunk is None:
            return manager.allocate(prompt.request_id, tokens, **options)
        if reuse == "gap":  # what is behind a gap is found for tokens that have blocks
            with contextlib.suppress(OutOfBlocks):
                return manager.allocate(prompt.request_id, tokens, **options)
        return manager.allocate(prompt.request_id, tokens, num_tokens=0, **options)

    def fork(self, prompt: Prompt, row: int) -> RequestBlocks:
        """Return the blocks of one of a prompt's rows, which share those of the prompt."""
        blocks, manager = prompt.blocks, self.store.manager
        written = min(len(prompt.tokens), blocks.settled)
        blocks.commit(written)
        if blocks.held > written:  # nobody wrote the rest, which cannot be shared
            manager.rollback(prompt.request_id, blocks.held - written)
            blocks.held = written
            blocks.look()
        branch = copy(blocks)
        branch.request_id = f"{prompt.request_id}-{row}"
        self._lease.take(branch.request_id)
        manager.fork(prompt.request_id, branch.request_id)
        prompt.branches[row] = branch
        return branch

    def end(self, branch: RequestBlocks) -> None:
        """Ends a row's own request."""
        self._lease.free(branch.request_id)

    def publishes(self) -> bool:
        """Return whether the model is what it was when the call began."""
        return bool(self._lease.publishes())

    def close(self) -> None:
        """Gives all blocks back; complete ones stay published until they are evicted."""
        self._lease.close()
