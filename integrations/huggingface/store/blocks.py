"""The blocks of one request, and the writes from a contiguous cache to them."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from ....cache import OutOfBlocks
from ....cache.allocation import Pairs
from ..api import DynamicCache
from ..layers import States, attention_layers, columns, window_layers
from .storage import AnyManager, ModelStorage, block_index


class RequestBlocks:
    """The blocks of one request, and how far they are filled."""

    def __init__(self, requests: Any, storage: ModelStorage, request_id: str) -> None:
        # `requests` is a weak proxy of the `PromptRequests` of the call.
        self.requests, self.storage, self.request_id = requests, storage, request_id
        self.manager: AnyManager = requests.manager
        self.held = 0  # number of tokens that have blocks
        self.written = 0  # number of leading blocks that are filled
        self.known = 0  # number of tokens that were cached when the request was admitted
        self.borrowed: int | None = None  # another request's block in which the hit ends, if it ends inside a block
        self.closed = False  # whether nothing more is written to blocks
        # The next three are only for packed passes. `length` is the number of tokens whose KV is in blocks after the
        # current pass. `unsettled`: whether the next commit frees blocks that a copy or merge replaced.
        self.length, self.unsettled = 0, False
        self.copies: list[tuple[int, Pairs]] = []  # block copies by group that must run before the next pass
        self.full: OutOfBlocks | None = None  # the error, if there was no room for more tokens
        self.tables: list[np.ndarray] = []  # the block table of each group, see `look`

    @property
    def settled(self) -> int:
        """The number of tokens that may be committed: the written blocks, and a part of the block after them."""
        return min(self.held, (self.written + 1) * self.storage.block_size - 1)

    def look(self) -> None:
        """Set `tables` to the manager's current block tables. Call this after the manager has changed blocks."""
        groups = range(len(self.storage.groups))
        self.tables = [self.manager.block_table(self.request_id, group) for group in groups]

    def read_from(self, group: int, first: int, length: int) -> np.ndarray:
        """Return the blocks of a group, from `first` on, that hold the first `length` tokens."""
        blocks: np.ndarray = self.tables[group][first : -(-length // self.storage.block_size)]
        if self.borrowed is not None and first + len(blocks) > self.written:
            blocks = blocks.copy()
            blocks[self.written - first] = self.borrowed
        return blocks

    def serves(self, length: int) -> bool:
        """Return whether the request holds all blocks that queries after the first `length` tokens read."""
        size = self.storage.block_size
        for group, _ in self.storage.kv:
            needed = self.storage.groups[group].needed(length, -(-length // size), size)
            if (self.tables[group][needed] < 0).any():
                return False
        return True

    def hold(self, new: Sequence[int] | np.ndarray) -> bool:
        """Allocate blocks for the next tokens and return whether there was room."""
        if len(new):
            try:
                allocation = self.manager.append(self.request_id, new)
            except OutOfBlocks as error:
                self.full, self.closed = error, True
                return False
            pairs = [(group, allocation.group_copies(group)) for group in range(len(self.tables))]
            self.copies = [*self.copies, *(pair for pair in pairs if pair[1])]
            self.held += len(new)
            self.look()
        return True

    def commit(self, num_tokens: int) -> None:
        """Publish the complete blocks of the first tokens. Equal blocks that are already published replace them."""
        self.manager.commit(self.request_id, num_tokens)
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
        """Write and commit the complete blocks among the first `end` tokens, except the spans in `skip`.

        The tokens are in `row` of the cache, after `pad` columns. `states` is a checkpoint at `end` to keep. Nothing is
        published if the model has changed, or if a hook has removed tokens from the cache.
        """
        # Layers with windows are written in steps, because a commit frees blocks for the next step.
        if self.closed:
            return
        if not self.requests.publishes():
            self.closed = True
        elif min(columns(cache), default=pad + end) < pad + end:
            self.storage.evicts = self.closed = True
        size, chunk, end = self.storage.block_size, self.storage.chunk, min(end, len(tokens))
        if end // size <= self.written and not states:  # no further block is complete
            return
        gone = max((layer.first for layer in window_layers(cache)), default=0)
        self.closed |= gone > pad + self.written * size
        at = min(self.written * size, end - 1)
        while not self.closed and at < end:
            at = end if chunk is None else min(end, at + chunk * size)
            if not self.hold(tokens[self.held : at]):
                return
            last = at // size
            for first, behind in _between(skip, size, self.written, last):
                _write(cache, self.storage, self.tables, row, pad, first, behind)
            self.written = max(last, self.written)
            if states is not None and at == end:
                self.keep_states(end, states)
            self.commit(at)

    def keep_states(self, length: int, states: States) -> None:
        """Write a checkpoint of states at the end of a block, if there is room. The next commit publishes it."""
        storage, block = self.storage, length // self.storage.block_size - 1
        if storage.states is not None and self.tables[storage.state_group][block] < 0:
            with contextlib.suppress(OutOfBlocks):
                # An interrupted write is never committed, so no request finds it.
                row = {name: state[0] for name, state in states.items()}
                storage.states.put(self.manager.checkpoint(self.request_id, length), row)


def free(manager: AnyManager, request_id: Hashable, returns: float | None = None) -> None:
    """End a request, if it was started."""
    with contextlib.suppress(KeyError):
        manager.free(request_id, returns)


def _write(
    cache: DynamicCache, storage: ModelStorage, tables: list[np.ndarray], row: int, pad: int, first: int, last: int
) -> None:
    """Write a row of a cache, whose tokens begin after `pad` columns, to blocks `first` to `last` of each table."""
    size, layers = storage.block_size, attention_layers(cache)
    for group, part in storage.kv:
        blocks = block_index(tables[group][first:last])
        for index in part.specs:
            layer = layers[index]
            begin = pad - getattr(layer, "first", 0)
            tokens = slice(begin + first * size, begin + last * size)
            part.write(index, blocks, layer.keys[row, :, tokens], layer.values[row, :, tokens])


def _between(spans: Iterable[tuple[int, int]], size: int, first: int, last: int) -> list[tuple[int, int]]:
    """Return the runs of blocks from `first` to `last` that no span of tokens touches."""
    runs = []
    for start, end in [*spans, (last * size, last * size)]:
        if first < min(start // size, last):
            runs.append((first, min(start // size, last)))
        first = max(first, -(-end // size))
    return runs
