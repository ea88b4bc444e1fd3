"""The batch of one call of generate: what is cached is laid out, and the rest computed up to its loop's first pass."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ..store import Lease, Store
from .grouped import CHUNK
from .hidden import HiddenRows
from .layers import GrowingLayer, GrowingWindowLayer, attention_layers, like, num_tokens, release
from .layout import lay_out, read, read_behind
from .passes import forward
from .pictures import Pictures
from .prompts import Prompt, prompts_of
from .rows import Rows
from .states import take_states

FORWARD_COST = 24
"""Tokens whose computing takes about as long as what a forward pass of any length costs besides."""
ROOM = 256
"""Tokens of answer for which there is room before buffers are enlarged."""


@dataclass(frozen=True, eq=False)
class Asked:
    """What a call asks for.

    Attributes:
        input_ids: `[batch, length]`.
        mask: `[batch, length]`, or None when no token is left out.
        extra_keys: What KV depends on besides tokens.
        salt: Whose blocks may be shared.
        max_length: Tokens that a row has at the end at most.
        reuse: Whether cached tokens are left out, or all is computed and only kept.
        pictures: Images of the rows.
        adapters: Of each row, where they differ; rows are then computed together.
        continued: A cache of the first tokens of every row, which is gone on with in place of blocks.
        alone: Whether it is one row without padding, which may go on with a cache that another call has left.
        by_row: Whether the loop gives each row of the cache its row of the result.
        eos: Tokens behind which a row is padding.
        chunk: Tokens of a row that one pass computes at most, where layers have windows; None: as many as suit them.
        hidden: Hidden states of cached tokens, where the result is to have them; only what has some is then read.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor | None
    extra_keys: tuple[Any, ...]
    salt: Any
    max_length: int
    reuse: bool = True
    pictures: Pictures | None = None
    adapters: list[str] | None = None
    continued: DynamicCache | None = None
    alone: bool = False
    by_row: bool = True
    eos: frozenset[int] = frozenset()
    hidden: HiddenRows | None = None
    chunk: int | None = None


class Batch:
    """The batch of one call as prompts over a store.

    Args:
        model: The model.
        store: Where KV is kept.
        asked: What the call asks for.
        lease: Of `store`; kept by the caller as long as the call lasts.

    Raises:
        OutOfBlocks: The prompts do not fit.
    """

    def __init__(self, model: Any, store: Store, asked: Asked, lease: Lease) -> None:
        self.model = model
        self.store = store
        self.batch, self.length = asked.input_ids.shape
        # Behind a document for a question too, which then goes on with the cache in place.
        self.room = max(1, min(max(asked.max_length - self.length, self.length // 8), ROOM))
        self.pictures = asked.pictures
        self._asked, self._hidden = asked, asked.hidden
        self.prompts = prompts_of(asked.input_ids, asked.mask, asked.pictures, asked.adapters)
        self.rows = Rows(store, asked.extra_keys, asked.salt, lease)
        self.cache: DynamicCache = None
        self.start = 0
        try:
            for prompt in self.prompts:
                if len(prompt.tokens):
                    self.rows.admit(prompt, asked.reuse and asked.continued is None)
                    self._limit_to_hidden(prompt)
            if asked.continued is None:
                self._prepare(asked.reuse)
                if self.cache is None and asked.alone:
                    self.cache = store.kept.take(self.prompts[0].tokens[: self.start], asked.extra_keys, asked.salt)
                if self.cache is None:
                    self.cache = self._lay_out({})
            else:
                self._go_on(asked.continued)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives all blocks back."""
        self.rows.close()

    def _limit_to_hidden(self, prompt: Prompt) -> None:
        """Reads no token whose hidden states are not there."""
        for last in (False, True):
            if self._hidden is None or not prompt.cached:
                return
            have = self._hidden.available(prompt.tables[0], prompt.cached)
            if have < prompt.cached:
                self.rows.readmit(prompt, 0 if last else have)

    def _prepare(self, reuse: bool) -> None:
        """Makes the cache for the batch, or leaves it to be laid out from blocks with `start` columns filled."""
        alone = len(self.prompts) == 1 and self.batch == 1
        columns = self._readable(min((p.pad + p.cached for p in self.prompts), default=0))
        by_rows = reuse and self._may_split()
        if by_rows and self.store.states is not None:
            by_rows = self._has_boundaries()
        elif by_rows:
            cost, gaps = self._rows_cost(), any(p.later for p in self.prompts)
            long = self.store.storage.chunk is not None and self.length - columns > 2 * CHUNK
            by_rows = not (alone and not gaps) and cost < self.batch * (self.length - columns)
            by_rows |= long and cost < float("inf")
        if by_rows:
            self._compute_rows()
            return
        if columns and not self.store.storage.simple:
            columns = self._servable(columns)
        self.start = columns if self.store.states is None else 0
        for prompt in self.prompts:
            prompt.cached = max(self.start - prompt.pad, 0)
            prompt.later = []
        self.start = self.start if any(p.cached for p in self.prompts) else 0
        self.cache = None if self.start else self._empty()

    def _go_on(self, cache: DynamicCache) -> None:
        self.cache, self.start = cache, num_tokens(cache)
        for prompt in self.prompts:
            prompt.cached = min(max(self.start - prompt.pad, 0), len(prompt.tokens))

    def _may_split(self) -> bool:
        """Whether rows may be computed by themselves up to their last tokens, and these together."""
        if (
            self._asked.adapters is not None
            or self._hidden is not None
            or (self.store.heeds_padding and any(p.pad for p in self.prompts))
        ):
            return False
        behind = self.length - (1 if self.store.states is None else 2)
        return all(p.computable(behind - p.pad) for p in self.prompts)

    def _readable(self, columns: int) -> int:
        """So many columns, or fewer where they would end within an image and must not."""
        while (fewer := min((p.readable(columns - p.pad) + p.pad for p in self.prompts), default=0)) < columns:
            columns = fewer
        return columns

    def _servable(self, columns: int) -> int:
        """So many columns, or fewer where blocks that are read behind them are not held."""
        while True:
            for prompt in self.prompts:
                if 0 < columns - prompt.pad < prompt.cached and not self.rows.serves(prompt, columns - prompt.pad):
                    self.rows.readmit(prompt, columns - prompt.pad)
            fewer = self._readable(min(p.pad + p.cached for p in self.prompts))
            if fewer == columns:
                return columns
            columns = fewer

    def features(self) -> dict[str, Any]:
        """What the loop's first forward pass takes for the images that it computes."""
        if self.pictures is None:
            return {}
        items = [item for row in self.pictures.items for item in row]
        return self.pictures.features(items, self.start, self.length)

    def _empty(self) -> DynamicCache:
        cache = like(self.store.empty_cache)
        for layer in attention_layers(cache).values():
            if isinstance(layer, GrowingLayer | GrowingWindowLayer):
                layer.room = self.room
        return cache

    def _has_boundaries(self) -> bool:
        """Whether states can be kept or read: every row goes on with two tokens, some prompt has a whole block."""
        lengths = [len(p.tokens) for p in self.prompts if p.pad + len(p.tokens) == self.length]
        return len(lengths) == len(self.prompts) and min(lengths) > 2 and max(lengths) - 2 >= self.store.block_size

    def _rows_cost(self) -> float:
        """Cost of computing prompt by prompt, in tokens; infinite where a row does not end with its prompt."""
        cost = float(self.batch)
        for number, prompt in enumerate(self.prompts):
            if prompt.pad + len(prompt.tokens) != self.length:
                return float("inf")
            known = prompt.cached + sum(end - start for start, end in prompt.later)
            if prompt.waits:
                known = max([known, *(_agree(prompt, other) for other in self.prompts[:number])])
            if len(prompt.tokens) - 1 > known:
                cost += len(prompt.tokens) - 1 - known + FORWARD_COST
        return cost

    def _compute_rows(self) -> None:
        """Computes every prompt by itself up to its last token, or its last two where states are kept."""
        behind = 1 if self.store.states is None else 2
        caches: dict[int, DynamicCache] = {}
        for number, prompt in enumerate(self.prompts):
            if prompt.waits and number:
                self.rows.readmit(prompt)
            caches[number] = self._compute(prompt, len(prompt.tokens) - behind)
        self.start = self.length - behind
        if len(self.prompts) == 1 and self.batch == 1:
            self.cache = caches[0]
        else:
            self.cache = self._lay_out(caches)

    def _compute(self, prompt: Prompt, end: int) -> DynamicCache:
        """A cache of one row with the first `end` tokens of a prompt."""
        size, at = self.store.block_size, min(prompt.cached, end)
        cache = self._empty()
        cuts = {end}
        if self.store.states is not None:
            cuts |= {cut for cut in (prompt.shared, end // size * size) if prompt.computable(cut)}
        if self.store.storage.chunk is not None:
            step = min(self._asked.chunk or CHUNK, CHUNK)
            cuts |= {cut for cut in range(at // step * step + step, end, step) if prompt.computable(cut)}
        if at:
            read(cache, self.store.storage, prompt, at, len(prompt.tokens) - at + self.room)
        for start, behind in prompt.later:
            forward(self.model, prompt.tokens, at, start, cache, prompt.inputs(at, start))
            at = min(behind, end)
            read_behind(cache, self.store.storage, prompt, start, at)
        for cut in sorted(cut for cut in cuts if at < cut <= end):
            forward(self.model, prompt.tokens, at, cut, cache, prompt.inputs(at, cut))
            at = cut
            boundary = self.store.states is not None and cut % size == 0
            self.rows.write(prompt, cache, 0, 0, cut, take_states(cache, 0) if boundary else None)
            release(cache, self.unwritten(prompt))
        self.rows.write(prompt, cache, 0, 0, end)
        return cache

    def _lay_out(self, caches: dict[int, DynamicCache]) -> DynamicCache:
        cache, unwritten = self._empty(), min(prompt.pad + self.unwritten(prompt) for prompt in self.prompts)
        capacity = self.length + self.room
        lay_out(cache, self.store.storage, self.prompts, caches, self.start, capacity, unwritten)
        return cache

    def unwritten(self, prompt: Prompt) -> int:
        """Tokens of a prompt, and of the answer that has the fewest, before those that are to go to blocks yet."""
        if prompt.closed:
            return sys.maxsize
        branches = [prompt.branches.get(row, prompt) for row in prompt.rows]
        open_ones = [branch.written for branch in branches if not branch.closed]
        return min(open_ones, default=sys.maxsize) * self.store.block_size


def _agree(one: Prompt, other: Prompt) -> int:
    """Tokens in which two prompts agree from their beginning; what stands for different images does not."""
    both = min(len(one.tokens), len(other.tokens))
    for a, b in zip(one.items, other.items, strict=False):
        if a.segment != b.segment:
            both = min(both, a.first - one.pad)
            break
    differ = np.flatnonzero(one.tokens[:both] != other.tokens[:both])
    return int(differ[0]) if differ.size else both
