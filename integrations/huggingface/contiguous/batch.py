"""The batch of one call of generate: what is cached is laid out, and the rest computed up to its loop's first pass."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ....cache.keys import Key
from ..store import Lease
from .layers import GrowingLayer, GrowingWindowLayer, attention_layers, like, num_tokens, release, take_states
from .layout import forward, lay_out, read, read_behind
from .moved import compute_moved
from .prompts import Prompt, RowImages, prompts_of
from .requests import PromptRequests
from .storage import CHUNK
from .store import ContiguousStore, HiddenStates

FORWARD_COST = 24  # tokens whose computing takes about as long as what a forward pass of any length costs besides
ROOM = 256  # tokens of answer for which there is room before buffers are enlarged


@dataclass(frozen=True, eq=False)
class Asked:
    """What a call asks for."""

    input_ids: torch.Tensor  # [batch, length]
    mask: torch.Tensor | None  # [batch, length]; None where no token is left out
    extra_keys: tuple[Any, ...]  # what KV depends on besides tokens
    salt: Key  # whose blocks may be shared
    max_length: int  # of a row at the end
    reuse: bool = True  # whether cached tokens are left out, or all is computed and only kept
    images: RowImages | None = None
    adapters: list[str] | None = None  # of each row, where they differ; rows are then computed together
    continued: DynamicCache | None = None  # of the first tokens of every row, gone on with in place of blocks
    by_token: bool = False  # whether the loop computes each row token by token, over keys and values alone
    by_row: bool = True  # whether the loop gives each row of the cache its row of the result
    eos: frozenset[int] = frozenset()  # tokens behind which a row is padding
    hidden: HiddenStates | None = None  # where the result is to have them; only what has some is then read
    chunk: int | None = None  # tokens of a row that one pass computes at most, where layers have windows

    @property
    def alone(self) -> bool:
        """Whether it is one row without padding, which may go on with a cache that another call has left."""
        single = self.by_token and len(self.input_ids) == 1 and self.mask is None
        return single and self.adapters is None and self.continued is None


class Batch:
    """The batch of one call as prompts over a store; the caller keeps the lease. OutOfBlocks: it does not fit."""

    def __init__(self, model: Any, store: ContiguousStore, asked: Asked, lease: Lease) -> None:
        self.model = model
        self.store = store
        self.batch, self.length = asked.input_ids.shape
        # Behind a document for a question too, which then goes on with the cache in place.
        self.room = max(1, min(max(asked.max_length - self.length, self.length // 8), ROOM))
        self.images = asked.images
        self._asked, self._hidden = asked, asked.hidden
        self.prompts = prompts_of(asked.input_ids, asked.mask, asked.images, asked.adapters)
        plain = asked.hidden is None and asked.images is None and asked.adapters is None and asked.continued is None
        self.requests = PromptRequests(store, asked.extra_keys, asked.salt, lease, anywhere=asked.reuse and plain)
        self.cache: DynamicCache = None
        self.start = 0  # columns that the cache has when the loop begins
        self.computed_for_hidden = 0  # cached tokens without the hidden states that are asked for
        try:
            for prompt in self.prompts:
                if len(prompt.tokens):
                    self.requests.admit(prompt, asked.reuse and asked.continued is None)
                    self._limit_to_hidden(prompt)
            if asked.continued is None:
                self._prepare(asked.reuse)
                if self.cache is None and asked.alone:
                    self.cache = store.kept.take(self.prompts[0].tokens[: self.start], asked.extra_keys, asked.salt)
                if self.cache is None:
                    self.cache = self._lay_out({})
            else:
                self.cache, self.start = asked.continued, num_tokens(asked.continued)
                for prompt in self.prompts:
                    prompt.cached = min(max(self.start - prompt.pad, 0), len(prompt.tokens))
        except BaseException:
            self.requests.close()
            raise

    def _limit_to_hidden(self, prompt: Prompt) -> None:
        """Reads no token whose hidden states are not there."""
        if self._hidden is None or not prompt.cached:
            return
        prompt.hidden = self._hidden.load(prompt.tables[0], prompt.cached)
        have = len(prompt.hidden[0]) if prompt.hidden else 0
        if have < prompt.cached:
            self.computed_for_hidden += prompt.cached - have
            self.requests.readmit(prompt, have)

    def _prepare(self, reuse: bool) -> None:
        """Makes the cache for the batch, or leaves it to be laid out from blocks with `start` columns filled."""
        alone = len(self.prompts) == 1 and self.batch == 1
        columns = self._readable(min((p.pad + p.cached for p in self.prompts), default=0))
        by_rows = reuse and self._may_split()
        if by_rows and self.store.states is not None:
            by_rows = self._has_boundaries()
        elif by_rows:
            cost, gaps = self._rows_cost(), any(p.later or p.moved for p in self.prompts)
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
            prompt.later, prompt.moved, prompt.repaired = [], [], prompt.repaired[:0]
        self.start = self.start if any(p.cached for p in self.prompts) else 0
        self.cache = None if self.start else self._empty()

    def _may_split(self) -> bool:
        """Whether rows may be computed by themselves up to their last tokens, and these together."""
        together = self._asked.adapters is not None or self._hidden is not None
        together = together or (self.store.counts_padding and any(p.pad for p in self.prompts))
        return not together and all(p.computable(self._end(p)) for p in self.prompts)

    def _end(self, prompt: Prompt) -> int:
        """Tokens of a prompt before the last columns of the batch, which its rows compute together."""
        behind = 1 if self.store.states is None else 2
        return min(len(prompt.tokens), self.length - behind - prompt.pad)

    def _readable(self, columns: int) -> int:
        """So many columns, or fewer where they would end within an image and must not."""
        while (fewer := min((p.readable(columns - p.pad) + p.pad for p in self.prompts), default=0)) < columns:
            columns = fewer
        return columns

    def _servable(self, columns: int) -> int:
        """So many columns, or fewer where blocks that are read behind them are not held."""
        while True:
            for prompt in self.prompts:
                if 0 < columns - prompt.pad < prompt.cached and not self.requests.serves(prompt, columns - prompt.pad):
                    self.requests.readmit(prompt, columns - prompt.pad)
            fewer = self._readable(min(p.pad + p.cached for p in self.prompts))
            if fewer == columns:
                return columns
            columns = fewer

    def features(self) -> dict[str, Any]:
        """What the loop's first forward pass takes for the images that it computes."""
        if self.images is None:
            return {}
        items = [item for row in self.images.items for item in row]
        return self.images.features(items, self.start, self.length)

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
        """Cost of computing prompt by prompt, in tokens; infinite where a row has unmasked tokens behind its prompt."""
        cost = float(self.batch)
        for number, prompt in enumerate(self.prompts):
            padded = prompt.last and self.store.storage.simple
            if not padded and prompt.pad + len(prompt.tokens) != self.length:
                return float("inf")
            known = prompt.cached + sum(end - start for start, end in (*prompt.later, *prompt.moved))
            known -= len(prompt.repaired)
            if prompt.waits:
                known = max([known, *(_agree(prompt, other) for other in self.prompts[:number])])
            if self._end(prompt) > known:
                cost += self._end(prompt) - known + FORWARD_COST
        return cost

    def _compute_rows(self) -> None:
        """Computes every prompt by itself up to the last column of the batch, or its last two where states are kept."""
        caches: dict[int, DynamicCache] = {}
        for number, prompt in enumerate(self.prompts):
            if prompt.waits and number:
                self.requests.readmit(prompt)
            caches[number] = self._compute(prompt, self._end(prompt))
        self.start = self.length - (1 if self.store.states is None else 2)
        if len(self.prompts) == 1 and self.batch == 1:
            self.cache = caches[0]
        else:
            self.cache = self._lay_out(caches)

    def _compute(self, prompt: Prompt, end: int) -> DynamicCache:
        """A cache of one row with the first `end` tokens of a prompt."""
        size, at = self.store.block_size, min(prompt.cached, end)
        cache = self._empty()
        if prompt.moved and self.store.moving is not None:
            room = len(prompt.tokens) - end + self.room
            compute_moved(self.model, self.store.storage, prompt, end, room, cache, self.store.moving)
            self.requests.publish(prompt, cache, 0, 0, end)
            return cache
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
            self.requests.publish(prompt, cache, 0, 0, cut, take_states(cache, 0) if boundary else None)
            release(cache, self.unwritten(prompt))
        self.requests.publish(prompt, cache, 0, 0, end)
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
