"""One call of generate: the model watched while its loop runs, and what it computes kept in blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ..api import ModelInLoop
from ..support import BY_TOKEN
from .batch import Batch
from .layers import States, columns, from_states, num_tokens, release, take_states
from .prompts import Prompt, Reused
from .store import of_steps


class Call:
    """A batch whose loop is watched: prompts are kept once they are computed, answers at the end."""

    def __init__(self, batch: Batch, tell: Callable[[Exception], None]) -> None:
        # `tell` hears why an answer is not kept.
        self._tell, self._keeps = tell, True
        self.batch, self.store, self.loop = batch, batch.store, batch.loop
        self._due = self._published = self.reads_nothing = False
        self._computed = self._kept = 0
        self._decode_states: dict[int, tuple[int, States]] = {}

    def keep(self, step: Callable[..., object], *args: Any) -> None:
        """Run a step that keeps something of the call. After a failure behind the first token nothing more is kept."""
        try:
            if self._keeps:
                step(*args)
        except Exception as error:
            if not self.loop.answered:
                raise
            self._keeps = False
            self._tell(error)
            self.batch.requests.close()

    def computed(self, tokens: int) -> None:
        """To be told after each forward pass of the loop how many tokens a row had in it."""
        self._computed += tokens
        if not self._published and self.batch.start + self._computed >= self.batch.length:
            self._due = True  # not now: the caller waits for the first token
        elif self.store.states is not None and self.batch.cache is not None:
            self._watch_states()

    def abandon(self) -> None:
        """The model goes on without the cache: nothing is reused and nothing kept."""
        self.batch.cache, self.batch.start, self._due, self._published = None, 0, False, True
        for prompt in self.batch.prompts:
            prompt.reused = Reused()

    def read_nothing(self) -> None:
        """Begin with an empty cache in the same place: what drafts tokens reads what is computed of every token."""
        batch = self.batch
        if batch.start and batch.cache is not None:
            batch.cache.layers = self.store.make_cache(batch.room).layers
            batch.cache.activate_past_recording()
            batch.start, self.reads_nothing = 0, True
            for prompt in batch.prompts:
                prompt.reused = Reused()

    def publish(self) -> None:
        """Publishes the prompts once they are computed; called before the next forward pass, and at the end."""
        if not self._due:
            return
        self._due, self._published = False, True
        self.batch.publish()
        self._kept = self._computed
        self._release()

    def _release(self) -> None:
        """Lets layers with windows forget what is in blocks, or will not be."""
        batch = self.batch
        if self.store.storage.chunk is None or batch.cache is None:
            return
        kept = [p.pad + batch.unwritten(p) for p in batch.prompts if self.loop.by_row and self._answers_are_kept(p)]
        release(batch.cache, min(kept, default=sys.maxsize))

    def _answers_are_kept(self, prompt: Prompt) -> bool:
        return len(prompt.tokens) > 0 and prompt.pad + len(prompt.tokens) == self.batch.length

    def keep_so_far(self, sequences: torch.Tensor) -> None:
        """Keep the answers in `sequences [batch, length]` so far, so that layers with windows need not hold them.

        In assisted decoding `sequences` ends in drafts that may be rejected, so answers are kept at the end alone.
        """
        enough = self._computed - self._kept >= self.batch.room
        if enough and self._published and self.loop.mode in BY_TOKEN and self.store.storage.chunk is not None:
            self._kept = self._computed
            self.keep_answers(sequences, last=False)

    def _watch_states(self) -> None:
        """Keeps a row's states where its last token ends a block: the next round may go on from there."""
        for prompt in self.batch.prompts:
            length = self.batch.start + self._computed - prompt.pad
            if length % self.store.block_size == 0:
                for row in prompt.rows:
                    self._decode_states[row] = (length, take_states(self.batch.cache, row))

    def add_hidden(self, outputs: Any) -> None:
        """Puts the hidden states of cached tokens before those that the first pass has computed."""
        batch = self.batch
        if batch.hidden is None or self._computed or not batch.start:
            return
        known = {row: prompt.hidden for prompt in batch.prompts for row in prompt.rows}
        outputs.hidden_states = tuple(
            torch.cat([torch.stack([known[row][number][: batch.start] for row in range(batch.size)]), layer], 1)
            for number, layer in enumerate(outputs.hidden_states)
        )

    def keep_hidden(self, steps: Any) -> None:
        """Keeps a result's hidden states: of each pass and layer `[batch, tokens, width]`, the prompts' first."""
        batch = self.batch
        if not batch.requests.publishes():
            return
        if batch.hidden is None or batch.cache is None or not steps or self._computed + batch.start < batch.length:
            return
        for prompt in batch.prompts:
            if any(layer.dim() != 3 or layer.shape[1] != len(prompt.tokens) for layer in steps[0]):
                continue
            whole = self.loop.by_row and len(prompt.rows) == 1 and not prompt.blocks.closed
            table = prompt.blocks.tables[0]
            batch.hidden.keep(table[: prompt.blocks.written], of_steps(steps if whole else steps[:1], prompt.rows[0]))

    def intact(self, length: int) -> bool:
        """Return whether the cache has so many columns, all computed by the model that the call began with."""
        batch = self.batch
        whole = not (columns(batch.cache) - {length})
        self.store.storage.evicts |= not whole
        return whole and batch.requests.publishes()

    def keep_answers(self, sequences: torch.Tensor, last: bool = True) -> None:
        """Keeps what a loop generated that gives each row of the cache its row of the result, `[batch, length]`."""
        batch = self.batch
        if batch.cache is None or not self.intact(sequences.shape[1] - 1):
            return
        have = batch.start + self._computed if self.store.states is not None else num_tokens(batch.cache)
        generated, eos = sequences[:, batch.length : have].cpu().numpy(), self.loop.eos
        for prompt in batch.prompts:
            for row in prompt.rows if self._answers_are_kept(prompt) else ():
                self._keep_answer(prompt, row, _up_to_eos(generated[row], eos), last)
        self._release()

    def _keep_answer(self, prompt: Prompt, row: int, answer: np.ndarray, last: bool) -> None:
        """Keeps the complete blocks of what a row has generated; `last`: the answer is whole."""
        size, length, batch = self.store.block_size, len(prompt.tokens), self.batch
        end = (length + len(answer)) // size * size
        blocks = prompt.branches.get(row, prompt.blocks)
        if end <= max(length, blocks.written * size) or blocks.closed:
            return
        if blocks is prompt.blocks and len(prompt.rows) > 1:
            blocks = batch.requests.fork(prompt, row)
        tokens = np.concatenate((prompt.tokens, answer))
        blocks.publish(batch.cache, row, prompt.pad, tokens, end, skip=prompt.reused.later)
        boundary, states = self._decode_states.get(row, (0, None))
        if states is not None and boundary <= blocks.written * size:
            blocks.keep_states(boundary, states)
            blocks.commit(blocks.settled)
        if last and blocks is not prompt.blocks:
            batch.requests.end(blocks)


def _up_to_eos(tokens: np.ndarray, eos: list[int]) -> np.ndarray:
    ends = np.flatnonzero(np.isin(tokens, eos)) if eos else tokens[:0]
    return tokens[: int(ends[0]) + 1] if ends.size else tokens


class WatchedModel(ModelInLoop):
    """Passes everything on to the model; the first inputs leave out what is cached, and a call hears of every pass."""

    def __init__(self, call: Call, chunked: bool) -> None:
        super().__init__(call.loop)
        self._call = call
        self._chunked, self._first = chunked, True

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the prompt: by the model's own steps, which may cut it into chunks and leave out what is cached."""
        self._first = not self._chunked
        return super().prefill(*args, **kwargs)

    def drafts_from_outputs(self) -> None:
        """Let the model compute the whole prompt: see `ModelInLoop`."""
        self._call.read_nothing()

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> Any:
        """The model's own inputs, of the tokens that the cache does not have."""
        call, batch = self._call, self._call.batch
        call.keep(call.keep_so_far, input_ids)
        behind = input_ids.shape[1] - batch.start if self._first and batch.start else None
        if self._first and call.reads_nothing and batch.images is not None:
            kwargs["mm_encoder_outputs"] = batch.features()
        self._first = False
        prepare = self._model.prepare_inputs_for_generation
        inputs = prepare(input_ids, next_sequence_length=behind or next_sequence_length, **kwargs)
        if batch.cache is not None and all(value is not batch.cache for value in inputs.values()):
            call.abandon()  # the model has dropped the cache: it computes all tokens anew
            if batch.images is not None:
                kwargs["mm_encoder_outputs"] = batch.features()
            inputs = prepare(input_ids, next_sequence_length=None, **kwargs)
        elif behind and not call.store.storage.specs and inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"][:, -behind:]  # states know no columns before these
        return inputs

    def compute(self, **inputs: Any) -> Any:
        """The model's own forward pass."""
        self._call.keep(self._call.batch.requests.publishes)
        self._call.keep(self._call.publish)
        with from_states() if self._call.store.states is not None else nullcontext():
            outputs = self._model(**inputs)
        self._call.add_hidden(outputs)
        ids = inputs.get("input_ids")
        self._call.keep(self._call.computed, ids.shape[1] if ids is not None else inputs["inputs_embeds"].shape[1])
        return outputs
