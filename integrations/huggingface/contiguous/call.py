"""One call of generate: what is cached is laid out, the rest computed, and what was computed kept."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ....cache import OutOfBlocks
from ..store import Lease, Store
from .grouped import CHUNK
from .hidden import HiddenRows
from .layers import GrowingLayer, GrowingWindowLayer, like, num_tokens, release
from .pictures import Pictures
from .prompts import Prompt, prompts_of
from .rows import Rows
from .states import States, put_states, take_states
from .storage import BlockIds, TokenSpec

FORWARD_COST = 24
"""Tokens whose computing takes about as long as what a forward pass of any length costs besides."""
ROOM = 256
"""Tokens of answer for which there is room before buffers are enlarged."""


class Call:
    """The batch of one call as prompts over a store.

    Args:
        model: The model.
        store: Where KV is kept.
        input_ids: `[batch, length]`.
        mask: `[batch, length]`, or None when no token is left out.
        extra_keys: What KV depends on besides tokens.
        salt: Whose blocks may be shared.
        reuse: Whether cached tokens are left out, or all is computed and only kept.
        max_length: Tokens that a row has at the end at most.
        lease: Of `store`; kept by the caller as long as the call lasts.
        pictures: Images of the rows.
        continued: A cache of the first tokens of every row, which is gone on with in place of blocks.
        adapters: Of each row, where they differ; rows are then computed together.
        alone: Whether it is one row without padding, which may go on with a cache that another call has left.
        by_row: Whether the loop gives each row of the cache its row of the result.
        eos: Tokens behind which a row is padding.
        hidden: Hidden states of cached tokens, where the result is to have them; only what has some is then read.

    Raises:
        OutOfBlocks: The prompts do not fit.
    """

    def __init__(
        self,
        model: Any,
        store: Store,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        extra_keys: tuple[Any, ...],
        salt: Any,
        reuse: bool,
        max_length: int,
        lease: Lease,
        pictures: Pictures | None = None,
        adapters: list[str] | None = None,
        continued: DynamicCache | None = None,
        alone: bool = False,
        by_row: bool = True,
        eos: frozenset[int] = frozenset(),
        hidden: HiddenRows | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.batch, self.length = input_ids.shape
        self.room = max(1, min(max_length - self.length, ROOM))
        self.pictures = pictures
        self._adapters = adapters
        self.prompts = prompts_of(input_ids, mask, pictures, adapters)
        self.rows = Rows(store, extra_keys, salt, lease)
        self.cache: DynamicCache = None
        self.start = 0
        self._by_row, self._eos = by_row, eos
        self._due = self._published = False
        self._computed = self._kept = 0
        self._decode_states: dict[int, tuple[int, States]] = {}
        self._hidden = hidden
        try:
            for prompt in self.prompts:
                if len(prompt.tokens):
                    self.rows.admit(prompt, reuse and continued is None)
                    self._limit_to_hidden(prompt)
            if continued is None:
                self._prepare(reuse)
                if self.cache is None and alone:
                    self.cache = store.kept.take(self.prompts[0].tokens[: self.start], extra_keys, salt)
                if self.cache is None:
                    self.cache = self._lay_out({})
            else:
                self._go_on(continued)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives all blocks back."""
        self.rows.close()

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
            self._adapters is not None
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
        for layer in cache.layers:
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
            cuts |= {cut for cut in range(at // CHUNK * CHUNK + CHUNK, end, CHUNK) if prompt.computable(cut)}
        if at:
            self._read(cache, prompt, at)
            if prompt.states is not None:
                put_states(cache, [prompt.states])
        for start, behind in prompt.later:
            forward(self.model, prompt.tokens, at, start, cache, prompt.inputs(at, start))
            at = min(behind, end)
            self._read_behind(cache, prompt, start, at)
        for cut in sorted(cut for cut in cuts if at < cut <= end):
            forward(self.model, prompt.tokens, at, cut, cache, prompt.inputs(at, cut))
            at = cut
            boundary = self.store.states is not None and cut % size == 0
            self.rows.write(prompt, cache, 0, 0, cut, take_states(cache, 0) if boundary else None)
            release(cache, self._unwritten(prompt))
        self.rows.write(prompt, cache, 0, 0, end)
        return cache

    def _read(self, cache: DynamicCache, prompt: Prompt, length: int) -> None:
        """Fills an empty cache of one row from blocks."""
        room, size = len(prompt.tokens) - length + self.room, self.store.block_size
        for group, part in self.store.storage.kv:
            first = self.store.storage.groups[group].first_needed(length, size)
            blocks = BlockIds(prompt.blocks(group, first, length, size))
            columns = length - first * size
            for index, specs in part.specs.items():
                keys, values = _buffers(specs, 1, columns + room)
                part.read(index, blocks, keys[0, :, :columns], values[0, :, :columns])
                _fill(cache.layers[index], keys, values, length, first * size)

    def _read_behind(self, cache: DynamicCache, prompt: Prompt, start: int, end: int) -> None:
        """Puts a span of a prompt from blocks behind what a cache of one row has."""
        first, behind = start // self.store.block_size, -(-end // self.store.block_size)
        for group, part in self.store.storage.kv:
            blocks = BlockIds(prompt.tables[group][first:behind])
            for index, specs in part.specs.items():
                keys, values = _buffers(specs, 1, end - start)
                part.read(index, blocks, keys[0], values[0])
                cache.layers[index].update(keys, values)

    def _lay_out(self, caches: dict[int, DynamicCache]) -> DynamicCache:
        """A cache of the whole batch with `start` columns: from the prompts' own caches, or else from blocks."""
        cache, size = self._empty(), self.store.block_size
        filled = [max(self.start - prompt.pad, 0) for prompt in self.prompts]
        unwritten = min(prompt.pad + self._unwritten(prompt) for prompt in self.prompts)
        for group, part in self.store.storage.kv:
            spec = self.store.storage.groups[group]
            firsts = [spec.first_needed(length, size) for length in filled]
            blocks = {
                number: BlockIds(prompt.blocks(group, firsts[number], length, size))
                for number, (prompt, length) in enumerate(zip(self.prompts, filled, strict=True))
                if length and number not in caches
            }
            origin = min([self.prompts[number].pad + firsts[number] * size for number in blocks], default=self.start)
            origin = min(origin, unwritten, spec.first_needed(self.start, 1))  # the first column of these layers
            for index, specs in part.specs.items():
                keys, values = _buffers(specs, self.batch, self.length + self.room - origin)
                for number, prompt in enumerate(self.prompts):
                    row, own = prompt.rows[0], caches[number].layers[index] if number in caches else None
                    first = firsts[number] * size if own is None else getattr(own, "first", 0)
                    begin = max(prompt.pad + first, origin) if filled[number] else self.start
                    columns = slice(begin - origin, self.start - origin)
                    for side in (keys, values):  # masked out, but NaN times 0 is NaN
                        side[row, :, : columns.start] = 0
                    if own is not None and filled[number]:
                        keys[row, :, columns] = own.keys[0, :, own.keys.shape[2] - self.start + begin :]
                        values[row, :, columns] = own.values[0, :, own.values.shape[2] - self.start + begin :]
                    elif number in blocks:
                        part.read(index, blocks[number], keys[row, :, columns], values[row, :, columns])
                    for other in prompt.rows[1:]:
                        for side in (keys, values):
                            side[other, :, : columns.stop] = side[row, :, : columns.stop]
                _fill(cache.layers[index], keys, values, self.start, origin)
        if self.store.states is not None:
            states = [take_states(caches[number], 0) for number in range(len(self.prompts))]
            of_row = {row: states[number] for number, p in enumerate(self.prompts) for row in p.rows}
            put_states(cache, [of_row[row] for row in range(self.batch)])
        return cache

    def computed(self, tokens: int) -> None:
        """To be told after each forward pass of the loop how many tokens a row had in it."""
        self._computed += tokens
        if not self._published and self.start + self._computed >= self.length:
            self._due = True  # not now: somebody waits for the first token
        elif self.store.states is not None and self.cache is not None:
            self._watch_states()

    def abandon(self) -> None:
        """The model goes on without the cache: nothing is reused and nothing kept."""
        self.cache, self.start, self._due, self._published = None, 0, False, True
        for prompt in self.prompts:
            prompt.cached = 0

    def publish(self, at_close: bool = False) -> None:
        """Makes the prompts findable once they are computed; called before the next forward pass, and at the end."""
        if not self._due:
            return
        self._due, self._published = False, True
        for prompt in self.prompts:
            if len(prompt.tokens):
                self.rows.write(prompt, self.cache, prompt.rows[0], prompt.pad, len(prompt.tokens), None, at_close)
        self._kept = self._computed
        self._release()

    def _unwritten(self, prompt: Prompt) -> int:
        """Tokens of a prompt, and of the answer that has the fewest, before those that are to go to blocks yet."""
        if prompt.closed:
            return sys.maxsize
        branches = [prompt.branches.get(row, prompt) for row in prompt.rows]
        open_ones = [branch.written for branch in branches if not branch.closed]
        return min(open_ones, default=sys.maxsize) * self.store.block_size

    def _release(self) -> None:
        """Lets layers with windows forget what is in blocks, or will not be."""
        if self.store.storage.chunk is None or self.cache is None:
            return
        kept = [p.pad + self._unwritten(p) for p in self.prompts if self._by_row and self._answers_are_kept(p)]
        release(self.cache, min(kept, default=sys.maxsize))

    def _answers_are_kept(self, prompt: Prompt) -> bool:
        return len(prompt.tokens) > 0 and prompt.pad + len(prompt.tokens) == self.length

    def keep_so_far(self, sequences: torch.Tensor) -> None:
        """Keeps answers while they are generated, so that layers with windows need not hold all of them.

        Args:
            sequences: `[batch, length]` of prompts and answers up to now.
        """
        enough = self._computed - self._kept >= self.room
        if enough and self._published and self._by_row and self.store.storage.chunk is not None:
            self._kept = self._computed
            self.keep_answers(sequences, last=False)

    def _watch_states(self) -> None:
        """Remembers a row's states where its last token ends a block: the next round may go on from there."""
        for prompt in self.prompts:
            length = self.start + self._computed - prompt.pad
            if length % self.store.block_size == 0:
                for row in prompt.rows:
                    self._decode_states[row] = (length, take_states(self.cache, row))

    def _limit_to_hidden(self, prompt: Prompt) -> None:
        """Reads no token whose hidden states are not there."""
        for last in (False, True):
            if self._hidden is None or not prompt.cached:
                return
            have = self._hidden.available(prompt.tables[0], prompt.cached)
            if have < prompt.cached:
                self.rows.readmit(prompt, 0 if last else have)

    def add_hidden(self, outputs: Any) -> None:
        """Puts the hidden states of cached tokens before those that the first pass has computed."""
        if self._hidden is None or self._computed or not self.start:
            return
        loaded = {row: self._hidden.load(p.tables[0], self.start) for p in self.prompts for row in p.rows[:1]}
        of_row = {row: loaded[p.rows[0]] for p in self.prompts for row in p.rows}
        outputs.hidden_states = tuple(
            torch.cat([torch.stack([of_row[row][layer] for row in range(self.batch)]).to(new.device), new], 1)
            for layer, new in enumerate(outputs.hidden_states)
        )

    def keep_hidden(self, steps: Any) -> None:
        """Keeps what a result has of hidden states, for later calls that ask for them.

        Args:
            steps: Of each pass and layer `[batch, tokens, width]`, the prompts' first.
        """
        if self._hidden is None or self.cache is None or not steps:
            return
        sizes = {(layer.dim(), *layer.shape[:2]) for layer in steps[0]}
        if sizes != {(3, self.batch, self.length)} or self._computed + self.start < self.length:
            return
        self.rows.settle()
        for prompt in self.prompts:
            row, size = prompt.rows[0], self.store.block_size
            whole = self._by_row and len(prompt.rows) == 1 and not prompt.closed
            passes = steps if whole else steps[:1]
            end = min(prompt.written * size, self.length + len(passes) - 1)
            begin = self.start // size * size
            if begin < end:
                rows = [torch.cat([step[layer][row] for step in passes])[begin:end] for layer in range(len(steps[0]))]
                self._hidden.store(self.rows.tables(prompt.request_id)[0], begin, rows)

    def keep_answers(self, sequences: torch.Tensor, last: bool = True) -> None:
        """Keeps what a loop generated that gives each row of the cache its row of the result.

        Args:
            sequences: `[batch, length]` of prompts and answers.
            last: Whether the answers are whole.
        """
        if self.cache is None:
            return
        have = self.start + self._computed if self.store.states is not None else num_tokens(self.cache)
        generated = sequences[:, self.length : have].cpu().numpy()
        for prompt in self.prompts:
            if self._answers_are_kept(prompt):
                answers = [_up_to_eos(generated[row], self._eos) for row in prompt.rows]
                self.rows.append(prompt, self.cache, answers, self._decode_states, last)
        self._release()


def _agree(one: Prompt, other: Prompt) -> int:
    """Tokens in which two prompts agree from their beginning; what stands for different images does not."""
    both = min(len(one.tokens), len(other.tokens))
    for a, b in zip(one.items, other.items, strict=False):
        if a.segment != b.segment:
            both = min(both, a.first - one.pad)
            break
    differ = np.flatnonzero(one.tokens[:both] != other.tokens[:both])
    return int(differ[0]) if differ.size else both


def _up_to_eos(tokens: np.ndarray, eos: frozenset[int]) -> np.ndarray:
    ends = np.flatnonzero(np.isin(tokens, list(eos))) if eos else tokens[:0]
    return tokens[: int(ends[0]) + 1] if ends.size else tokens


def _buffers(specs: tuple[TokenSpec, TokenSpec], rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = specs
    return keys.empty(rows, capacity), values.empty(rows, capacity)


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0) -> None:
    """Gives a layer buffers that have its columns from `first` up to `length`."""
    if isinstance(layer, GrowingWindowLayer):
        layer.adopt(keys, values, length, first)
    elif isinstance(layer, GrowingLayer):
        layer.adopt(keys, values, length)
    else:
        layer.update(keys[:, :, :length], values[:, :, :length])


def accepted(model: Any, **inputs: Any) -> dict[str, Any]:
    """Those of the inputs that a model's forward knows."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}


@torch.no_grad()
def forward(
    model: Any,
    tokens: np.ndarray,
    start: int,
    end: int,
    cache: DynamicCache,
    given: dict[str, Any] | None = None,
) -> Any:
    """Computes tokens `start` to `end` of one row behind those in a cache, with the inputs that generate would give.

    Args:
        model: The model.
        tokens: Of the row.
        start: The first token to compute, as many as the cache has.
        end: Behind the last.
        cache: Of one row.
        given: Positions, types and images up to `end`; None: those of text.
    """
    ids = torch.from_numpy(tokens[:end])[None].to(model.device)
    options: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    first = start == 0 or given is not None
    if given is None:
        positions = model._prepare_position_ids_for_generation(ids, {"attention_mask": torch.ones_like(ids)})
        given = accepted(model, position_ids=positions)
    inputs = model.prepare_inputs_for_generation(
        ids,
        next_sequence_length=end - start,
        past_key_values=cache,
        attention_mask=None,
        **given,
        is_first_iteration=first,
        use_cache=True,
        **options,
    )
    return model(**inputs, return_dict=True)


__all__ = ["Call", "OutOfBlocks", "accepted", "forward"]
