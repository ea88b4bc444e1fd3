"""The admission of prompts: which tokens of a prompt are cached, and which blocks its request gets.

Every runner admits its prompts here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from copy import copy
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from ...cache import OutOfBlocks
from .layers import States
from .loop import Loop
from .prompts import Prompt, PromptHit
from .store.blocks import RequestBlocks, free
from .store.kept import PromptStore
from .store.storage import BlockContent


def extra_keys(store: PromptStore, keys: tuple[Any, ...], prompt: Prompt) -> list[Any]:
    """Return everything that a prompt's KV depends on besides its tokens. `keys` are common to its call."""
    if store.probed.counts_padding and prompt.pad:
        keys = (*keys, "columns before it", str(prompt.pad))
    if prompt.adapter is not None:
        keys = (*keys, "adapter of the row", prompt.adapter)
    return [*keys, *prompt.image_keys()]


class PromptRequests:
    """The requests of one call. If the call is interrupted, the next call ends its requests.

    The frame of the call must hold the only strong reference, so that an interrupt drops this object at once.

    Args:
        store: The blocks.
        keys: Everything that the KV of all prompts depends on besides their tokens.
        salt: Only calls with an equal salt share blocks.
        returns: The probability that the conversation resumes soon; see `CacheManager.free`.
        unchanged: Returns whether the model is unchanged since the call started.
    """

    def __init__(
        self,
        store: PromptStore,
        keys: tuple[Any, ...],
        salt: Any = None,
        returns: float | None = None,
        unchanged: Callable[[], bool] = lambda: True,
    ) -> None:
        self.store, self.manager = store, store.manager
        self.anywhere = False  # whether the call may reuse text that is cached at other positions
        self.stale = False  # whether the model has changed since the call started
        self._keys, self._salt, self._returns, self._unchanged = keys, salt, returns, unchanged
        self._request_ids: list[str] = []
        self._made_in = os.getpid(), threading.get_ident()
        store.sweep()
        store.running[weakref.ref(self)] = self._request_ids

    def lost(self) -> bool:
        """Return whether this is a child process that another thread forked, which lacks the thread of the call."""
        process, thread = self._made_in
        return process != os.getpid() and thread != threading.main_thread().ident

    @classmethod
    def of(cls, store: PromptStore, loop: Loop) -> PromptRequests:
        """Return the requests of a loop, which the frame of its runner must hold."""
        return cls(store, loop.extra_keys, loop.salt, loop.returns, loop.unchanged)

    def blocks(self, prompt: Prompt) -> RequestBlocks:
        """Return an empty `RequestBlocks` for a prompt."""
        return RequestBlocks(weakref.proxy(self), self.store.storage, prompt.request_id)

    def publishes(self) -> bool:
        """Return whether the model is unchanged since the call started, so that the call may publish blocks.

        Once False, it stays False. Callers must ask before each forward pass, or during the replay of a graph.
        """
        self.stale = self.stale or not self._unchanged()
        return not self.stale

    def end(self, request_id: str) -> None:
        """End one request, if it was started. Its complete blocks stay published until they are evicted."""
        free(self.manager, request_id)
        self._request_ids.remove(request_id)

    def close(self) -> None:
        """End all requests of the call."""
        while self._request_ids:
            free(self.manager, self._request_ids[-1], self._returns)
            self._request_ids.pop()

    def admit(self, prompt: Prompt, read_cached: bool = True, most: int | None = None) -> None:
        """Allocate blocks for a prompt and find its cached tokens.

        Args:
            prompt: The prompt. This method sets its `allocation`, `blocks` and `hit`.
            read_cached: Whether cached tokens are read. If not, all tokens are computed, and published as usual.
            most: The most cached tokens to find. None: all.

        Raises:
            OutOfBlocks: The prompt does not fit.
        """
        store = self.store
        allocation, limit, cached, kv_hit = self._allocate(prompt, self._limit(prompt, most), anywhere=most is None)
        whole = bool(cached == limit - 1 and (allocation.group_slot_mapping(0)[-1:] < 0).any())
        prompt.allocation, prompt.blocks = allocation, self.blocks(prompt)
        self._fill(prompt, limit, cached, whole)
        later = [span for span in allocation.cached_spans if span[0] > cached] if read_cached else []
        if allocation.moved:
            store.storage.move(allocation, store.probed.rotations)
        elif copies := allocation.group_copies(0):
            prompt.blocks.borrowed = copies[0][0]
        states = None
        if store.states is not None and cached and read_cached:
            table = prompt.blocks.tables[store.storage.state_group]
            states = store.states.states_of(store.states.content(int(table[cached // store.block_size - 1])))
        cached = prompt.readable(cached)
        if store.evicted.used and read_cached and not (whole or later or allocation.moved) and most is None:
            found = cached
            cached, states = self._bring_back(prompt, cached, states)
            cached = prompt.readable(cached)
            prompt.from_tiers = max(cached - found, 0)
            store.subtract(0, 0, -prompt.from_tiers)
        if not read_cached:
            prompt.hit = PromptHit()
            return
        moved = [(span.start, span.end) for span in allocation.moved]
        repaired = allocation.recompute_moved(store.options.recompute)
        prompt.hit = PromptHit(cached, later, moved, repaired, states, max(cached, kv_hit))

    def _limit(self, prompt: Prompt, most: int | None) -> int:
        """Return the number of a prompt's tokens to look up for a hit of at most `most` tokens. None: of any length."""
        limit = len(prompt.tokens)
        if self.store.states is not None:  # recurrent layers need at least two tokens to compute
            limit = max(limit - 1, 1)
        return limit if most is None else min(limit, most + 1)

    def _allocate(self, prompt: Prompt, limit: int, anywhere: bool) -> tuple[Any, int, int, int]:
        """Start a request for up to `limit` tokens of a prompt, with a hit after which the model can continue.

        Returns:
            The allocation, its final limit, the number of cached leading tokens, and the number of tokens cached for
            attention layers if recurrent states allow only a shorter hit.
        """
        store, kv_hit = self.store, 0
        reuse = "prefix" if prompt.items else store.options.reuse  # a gap may end inside an image
        if reuse == "anywhere" and not (anywhere and self.anywhere):
            reuse = "prefix"
        options = {"extra_keys": extra_keys(store, self._keys, prompt) or None, "salt": self._salt, "reuse": reuse}
        while True:
            self._request_ids.append(prompt.request_id)
            tokens = prompt.tokens if limit == len(prompt.tokens) else prompt.tokens[:limit]
            allocation = self._start(prompt.request_id, tokens, options)
            spans = allocation.cached_spans
            cached = spans[0][1] if spans and spans[0][0] == 0 else 0
            kv_hit = kv_hit or allocation.junction or 0
            if store.storage.any_prefix or prompt.readable(cached) == cached:
                return allocation, limit, cached, kv_hit
            limit = prompt.readable(cached) + 1  # no states, or no blocks of windows, for this length
            store.subtract(1, limit, allocation.num_cached_tokens)
            self.end(prompt.request_id)

    def _start(self, request_id: str, tokens: np.ndarray, options: dict[str, Any]) -> Any:
        """Start a request in the manager and return its allocation."""
        if not self.store.by_steps:
            return self.manager.allocate(request_id, tokens, **options)
        if options["reuse"] == "gap":  # only a request with blocks for all tokens finds blocks after a gap
            with contextlib.suppress(OutOfBlocks):
                return self.manager.allocate(request_id, tokens, **options)
        return self.manager.allocate(request_id, tokens, num_tokens=0, **options)

    def _fill(self, prompt: Prompt, limit: int, cached: int, whole: bool) -> None:
        """Record how far the blocks of an admitted prompt are filled. With `whole`, its last token is cached too."""
        store, blocks = self.store, prompt.blocks
        filled = limit if whole else cached
        blocks.written = filled // store.block_size
        if store.by_steps:
            blocks.held = store.manager.num_tokens(prompt.request_id)
            blocks.known = max(cached, blocks.held)
        else:
            blocks.held, blocks.known = limit, filled
        blocks.look()

    def _bring_back(self, prompt: Prompt, cached: int, states: States | None) -> tuple[int, States | None]:
        """Extend a prompt's hit by copies of blocks from lower tiers, and of cached blocks after a gap.

        Returns:
            The number of cached tokens, and the states after the last of them.
        """
        store, blocks, size = self.store, prompt.blocks, self.store.block_size
        found, kept = self._found_below(prompt, blocks.written)
        step = store.storage.chunk or len(found)
        for at in range(0, len(found), max(step, 1)):
            chunk = found[at : at + step]
            if not blocks.hold(prompt.tokens[blocks.held : (blocks.written + len(chunk)) * size]):
                return (cached if kept is not None else blocks.written * size), states
            for block, contents in enumerate(chunk, blocks.written):
                for (group, part), content in zip(store.storage.kv, contents, strict=True):
                    part.put(int(blocks.tables[group][block]), content)
            blocks.written, blocks.borrowed = blocks.written + len(chunk), None
            blocks.known = blocks.written * size
            if store.states is not None and kept is not None and at + step >= len(found):
                states = store.states.states_of(kept)
                blocks.keep_states(blocks.written * size, states)
            blocks.commit(blocks.written * size)
        return (min(blocks.written * size, len(prompt.tokens) - 1) if found else cached), states

    def _found_below(self, prompt: Prompt, first: int) -> tuple[list[list[BlockContent]], BlockContent | None]:
        """Return the KV of blocks from `first` on, up to one that is in no tier, and the states after the last block.

        If the model has states, the last block is one whose states are kept too.
        """
        store, evicted = self.store, self.store.evicted
        groups = [group for group, _ in store.storage.kv]
        digests = store.manager.block_hashes(prompt.request_id)[first:]
        has, content = partial(evicted.has, store.manager), partial(evicted.content, store.manager)
        found: list[list[BlockContent]] = []
        kept: BlockContent | None = None
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
            count, kept = len(found), None  # a tier has lost a block since

    def readmit(self, prompt: Prompt, most: int | None = None) -> None:
        """End a prompt's request and admit it again, with the blocks that are cached now."""
        assert prompt.allocation is not None
        self.store.subtract(1, self._limit(prompt, most), prompt.allocation.num_cached_tokens + prompt.from_tiers)
        prompt.from_tiers = 0
        self.end(prompt.request_id)
        self.admit(prompt, most=most)

    def fork(self, prompt: Prompt, row: int) -> RequestBlocks:
        """Fork the request of a prompt for one of its rows, and return the blocks of the fork."""
        blocks, manager = prompt.blocks, self.store.manager
        written = min(len(prompt.tokens), blocks.settled)
        blocks.commit(written)
        if blocks.held > written:  # blocks that were not written cannot be shared
            manager.rollback(prompt.request_id, blocks.held - written)
            blocks.held = written
            blocks.look()
        prompt.branches[row] = branch = self.branch(blocks, f"{prompt.request_id}-{row}")
        return branch

    def branch(self, blocks: RequestBlocks, request_id: str) -> RequestBlocks:
        """Fork a request and return the blocks of the fork, which shares all blocks until it writes to one."""
        branch = copy(blocks)
        branch.request_id = request_id
        self._request_ids.append(request_id)
        self.manager.fork(blocks.request_id, request_id)
        return branch
