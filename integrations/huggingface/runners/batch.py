"""The batch of one call, with the cache from which the decoding loop starts.

The cache holds tokens that were read from blocks, and tokens that were computed before the loop.

A column is a position in the padded batch.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from ..admit import PromptRequests
from ..api import DynamicCache
from ..layers import States, mark_written, num_tokens, take_states
from ..loop import Loop
from ..prompts import Prompt, PromptHit, RowImages, prompts_of
from ..store.kept import HiddenStates
from ..store.storage import CHUNK
from .layout import forward, lay_out, read, read_behind
from .moved import compute_moved

FORWARD_COST = 24  # fixed cost of a forward pass, in the number of tokens that take as long
ROOM = 256  # tokens of an answer that fit before buffers are enlarged


class Batch:
    """The prompts of one call, and the cache with which its loop begins.

    Args:
        requests: Admits the prompts. The caller must hold the only strong reference.
        loop: The call.
        images: The images of the call.
        hidden: Stored hidden states, if the result needs them. Then only tokens with hidden states are read.
        read_cached: Whether cached tokens are read. If not, all tokens are computed, and published as usual.

    Raises:
        OutOfBlocks: The prompts do not fit.
    """

    over_document = False  # whether the call reads a compressed document
    publishes_answers = True

    def __init__(
        self,
        requests: PromptRequests,
        loop: Loop,
        images: RowImages | None = None,
        hidden: HiddenStates | None = None,
        read_cached: bool = True,
    ) -> None:
        self.requests: PromptRequests = weakref.proxy(requests)
        self.store, self.loop, self.images, self.hidden = requests.store, loop, images, hidden
        self._read_cached = read_cached
        self.size, self.length = loop.input_ids.shape
        # A long prompt gets more room, so that a later question about it can continue in place.
        self.room = max(1, min(max(loop.generation_config.max_length - self.length, self.length // 8), ROOM))
        self.cache: Any = None
        self.start = 0  # number of columns in the cache when the loop begins
        self.computed_for_hidden = 0  # cached tokens that are computed because they have no hidden states
        self.prompts = self._prompts()
        try:
            for prompt in self.prompts:
                prompt.blocks = requests.blocks(prompt)
                self._admit(prompt)
            self._begin()
        except BaseException:
            requests.close()
            raise

    def _prompts(self) -> list[Prompt]:
        """Return the distinct prompts of the call."""
        loop = self.loop
        return prompts_of(loop.input_ids, loop.mask, self.images, loop.adapters)

    def _admit(self, prompt: Prompt) -> None:
        """Admit a prompt, if it has tokens."""
        if len(prompt.tokens):
            self.requests.admit(prompt, self._read_cached and self.loop.continued is None)
            self._limit_to_hidden(prompt)

    def _begin(self) -> None:
        """Make the cache with which the loop begins."""
        continued = self.loop.continued
        if continued is not None:
            self.cache, self.start = continued, num_tokens(continued)
            self._reads_to(self.start)
            return
        self._prepare()
        if self.cache is None and self.alone:
            self.cache = self.store.take_cache(self.prompts[0].tokens[: self.start], self.loop)
        if self.cache is None:
            self.cache = self._lay_out({})

    def inputs(self) -> dict[str, Any]:
        """Return the arguments with which the loop begins."""
        if self.cache is not None and any(getattr(layer, "record_past", False) for layer in self.loop.cache.layers):
            self.cache.activate_past_recording()  # an assistant's cache, which will be cropped
        images = {} if self.images is None else {"mm_encoder_outputs": self.features()}
        return {self.loop.cache_name: self.cache, **images}

    def read_nothing(self, cache: DynamicCache) -> None:
        """Drop all hits, so that the loop computes every token into `cache`, which is empty or None."""
        self.cache, self.start = cache, 0
        for prompt in self.prompts:
            prompt.hit = PromptHit()

    @functools.cached_property
    def by_token(self) -> bool:
        """Whether the loop computes each row token by token, over keys and values only."""
        return self.loop.by_token and self.store.states is None and self.images is None

    @functools.cached_property
    def alone(self) -> bool:
        """Whether the batch is one row without padding, which may continue from the cache of an earlier call."""
        loop = self.loop
        single = self.by_token and self.size == 1 and loop.mask is None
        return single and loop.adapters is None and loop.continued is None

    def _reads_to(self, column: int) -> None:
        """Read only the cached tokens before `column`."""
        for prompt in self.prompts:
            prompt.hit = PromptHit(min(max(column - prompt.pad, 0), len(prompt.tokens)))

    def _limit_to_hidden(self, prompt: Prompt) -> None:
        """Shorten a prompt's hit to tokens with hidden states, if the result needs them."""
        cached = prompt.hit.cached
        if self.hidden is None or not cached:
            return
        prompt.hidden = self.hidden.load(prompt.blocks.tables[0], cached)
        have = len(prompt.hidden[0]) if prompt.hidden else 0
        if have < cached:
            self.computed_for_hidden += cached - have
            self.requests.readmit(prompt, have)

    def _prepare(self) -> None:
        """Prepare the cache: compute each row separately, or read `start` columns and leave the rest to the loop."""
        alone = len(self.prompts) == 1 and self.size == 1
        columns = self._readable(min((p.pad + p.hit.cached for p in self.prompts), default=0))
        by_rows = self._read_cached and self._may_split()
        if by_rows and self.store.states is not None:
            by_rows = self._has_boundaries()
        elif by_rows:
            cost, gaps = self._rows_cost(), any(p.hit.later or p.hit.moved for p in self.prompts)
            long = self.store.storage.chunk is not None and self.length - columns > 2 * CHUNK
            by_rows = not (alone and not gaps) and cost < self.size * (self.length - columns)
            by_rows |= long and cost < float("inf")
        if by_rows:
            self._compute_rows()
            return
        if columns and not self.store.storage.any_prefix:
            columns = self._servable(columns)
        self.start = columns if self.store.states is None else 0
        self._reads_to(self.start)
        self.start = self.start if any(p.hit.cached for p in self.prompts) else 0
        self.cache = None if self.start else self.store.make_cache(self.room)

    def _may_split(self) -> bool:
        """Return whether rows can be prefilled separately, leaving the last one or two tokens for a joint pass."""
        together = self.loop.adapters is not None or self.hidden is not None or self.loop.has_types
        together = together or (self.store.probed.counts_padding and any(p.pad for p in self.prompts))
        return not together and all(p.computable(self._end(p)) for p in self.prompts)

    def _end(self, prompt: Prompt) -> int:
        """Return how many of a prompt's tokens come before the last columns, which all rows compute in a joint pass."""
        behind = 1 if self.store.states is None else 2
        return min(len(prompt.tokens), self.length - behind - prompt.pad)

    def _readable(self, columns: int) -> int:
        """Return the largest number of columns, up to `columns`, after which every prompt can continue."""
        while (fewer := min((p.readable(columns - p.pad) + p.pad for p in self.prompts), default=0)) < columns:
            columns = fewer
        return columns

    def _servable(self, columns: int) -> int:
        """Return the largest number of columns, up to `columns`, after which all blocks that queries read are held."""
        while True:
            for prompt in self.prompts:
                if 0 < (most := columns - prompt.pad) < prompt.hit.cached and not prompt.blocks.serves(most):
                    self.requests.readmit(prompt, most)
            fewer = self._readable(min(p.pad + p.hit.cached for p in self.prompts))
            if fewer == columns:
                return columns
            columns = fewer

    def features(self) -> dict[str, Any]:
        """Return the image inputs of the loop's first forward pass."""
        if self.images is None:
            return {}
        items = [item for row in self.images.items for item in row]
        return self.images.features(items, self.start, self.length)

    def _has_boundaries(self) -> bool:
        """Return whether computing rows separately lets recurrent states be kept or read.

        Every row must leave two tokens for the joint pass, and the tokens before these two must fill a block in one row
        at least.
        """
        lengths = [len(p.tokens) for p in self.prompts if p.pad + len(p.tokens) == self.length]
        return len(lengths) == len(self.prompts) and min(lengths) > 2 and max(lengths) - 2 >= self.store.block_size

    def _rows_cost(self) -> float:
        """Return the cost, in tokens, of computing each prompt separately; infinite if that is impossible.

        It is impossible if unmasked tokens follow a prompt. If layers have windows or states, it is impossible too if
        masked columns follow one.
        """
        cost = float(self.size)
        for number, prompt in enumerate(self.prompts):
            padded = prompt.last and self.store.storage.any_prefix
            if not padded and prompt.pad + len(prompt.tokens) != self.length:
                return float("inf")
            known = prompt.hit.tokens
            if prompt.waits:
                known = max([known, *(prompt.agrees(other) for other in self.prompts[:number])])
            if self._end(prompt) > known:
                cost += self._end(prompt) - known + FORWARD_COST
        return cost

    def _compute_rows(self) -> None:
        """Compute every prompt separately up to the last column of the batch, or the last two if states are kept."""
        caches: dict[int, DynamicCache] = {}
        for number, prompt in enumerate(self.prompts):
            if prompt.waits and number:
                self.requests.readmit(prompt)
            caches[number] = self._compute(prompt, self._end(prompt))
        self.start = self.length - (1 if self.store.states is None else 2)
        # A prompt's own cache lacks the columns of padding.
        if self.size == 1 and self._end(self.prompts[0]) == self.start:
            self.cache = caches[0]
        else:
            self.cache = self._lay_out(caches)

    def _compute(self, prompt: Prompt, end: int) -> DynamicCache:
        """Return a cache of one row with the first `end` tokens of a prompt."""
        store, model, hit, cache = self.store, self.loop.model, prompt.hit, self.store.make_cache(self.room)
        size, at = store.block_size, min(hit.cached, end)
        if hit.moved:
            compute_moved(model, prompt, end, len(prompt.tokens) - end + self.room, cache, store.probed)
            self._publish(prompt, cache, end)
            return cache
        cuts = {end}
        if store.states is not None:
            cuts |= {cut for cut in (hit.kv_hit, end // size * size) if prompt.computable(cut)}
        if store.storage.chunk is not None:
            step = min(self.loop.generation_config.prefill_chunk_size or CHUNK, CHUNK)
            cuts |= {cut for cut in range(at // step * step + step, end, step) if prompt.computable(cut)}
        if at:
            read(cache, prompt, at, len(prompt.tokens) - at + self.room)
        for start, behind in hit.later:
            forward(model, prompt.tokens, at, start, cache, prompt.inputs(at, start))
            at = min(behind, end)
            read_behind(cache, prompt, start, at)
        for cut in sorted(cut for cut in cuts if at < cut <= end):
            forward(model, prompt.tokens, at, cut, cache, prompt.inputs(at, cut))
            at = cut
            boundary = store.states is not None and cut % size == 0
            self._publish(prompt, cache, cut, take_states(cache, 0) if boundary else None)
            mark_written(cache, self.unwritten(prompt))
        self._publish(prompt, cache, end)
        return cache

    def _publish(self, prompt: Prompt, cache: DynamicCache, end: int, states: States | None = None) -> None:
        """Publish the tokens of a prompt from a cache of one row."""
        prompt.blocks.publish(cache, 0, 0, prompt.tokens, end, states, prompt.hit.later)

    def publish(self) -> None:
        """Publish the prompts from the batch's cache, once it has all of them."""
        for p in self.prompts:
            p.blocks.publish(self.cache, p.rows[0], p.pad, p.tokens, len(p.tokens), skip=p.hit.later)

    def _lay_out(self, caches: dict[int, DynamicCache]) -> DynamicCache:
        """Return a cache of the batch with its first `start` columns, from the prompts' own caches or from blocks."""
        cache = self.store.make_cache(self.room)
        unwritten = min(prompt.pad + self.unwritten(prompt) for prompt in self.prompts)
        capacity = self.length + self.room
        lay_out(cache, self.store.storage, self.prompts, caches, self.start, capacity, unwritten)
        return cache

    def unwritten(self, prompt: Prompt) -> int:
        """Return the position of the first token that is still to be written to a block; `sys.maxsize` if none is.

        Layers may drop the tokens before that position.
        """
        if prompt.blocks.closed:
            return sys.maxsize
        branches = [prompt.branches.get(row, prompt.blocks) for row in prompt.rows]
        open_ones = [branch.written for branch in branches if not branch.closed]
        return min(open_ones, default=sys.maxsize) * self.store.block_size
