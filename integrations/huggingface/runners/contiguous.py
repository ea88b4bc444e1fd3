"""The runner over contiguous copies of blocks. It follows the forward passes of a loop and publishes their KV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ....cache import FullAttention, OutOfBlocks
from ..admit import PromptRequests
from ..api import ModelInLoop, eos_tokens, result_cache
from ..calls import Calls, UnsupportedError, refuse_if
from ..layers import States, columns, from_states, mark_written, num_tokens, take_states
from ..loop import BY_TOKEN, CONTINUED, OWN_CACHE, Loop
from ..probe import probe_images
from ..prompts import Prompt, RowImages
from ..store.kept import PromptStore, continues, of_steps, record_of
from ..support import host_copy
from .batch import Batch


class WatchedModel(ModelInLoop):
    """The model that a loop calls for a batch. The first forward pass omits cached tokens.

    This class publishes prompts once they are computed, and answers at the end. If that fails, `warn` gets the error.
    """

    def __init__(self, batch: Batch, warn: Callable[[Exception], None]) -> None:
        super().__init__(batch.loop)
        self.batch, self.store = batch, batch.store
        self._warn, self._keeps = warn, True
        self._first, self._published, self._whole = True, False, False
        self._computed = self._kept = 0
        self._decode_states: dict[int, tuple[int, States]] = {}
        self._passes: list[tuple[int, torch.Tensor]] = []  # for `_answers`: first column and tokens of each pass

    def generate(self) -> Any:
        """Run the loop, publish the prompts and answers, and return the result."""
        batch = self.batch
        try:
            result = self._loop.run(self, **batch.inputs())
            self.keep(self.keep_result, result)
        finally:
            try:
                self.keep(self.publish)
            finally:
                batch.requests.close()
        return result

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the prompt with the model's own method.

        If the method cuts the prompt into chunks, it omits cached tokens itself.
        """
        self._first = not self._loop.generation_config.prefill_chunk_size
        return super().prefill(*args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> Any:
        """Return the model's own inputs for the tokens that are not in the cache."""
        batch = self.batch
        self.keep(self.keep_so_far, input_ids)
        behind = input_ids.shape[1] - batch.start if self._first and batch.start else None
        if self._first and self._whole and batch.images is not None:
            kwargs["mm_encoder_outputs"] = batch.features()
        self._first = False
        prepare = self._model.prepare_inputs_for_generation
        inputs = prepare(input_ids, next_sequence_length=behind or next_sequence_length, **kwargs)
        if batch.cache is not None and all(value is not batch.cache for value in inputs.values()):
            refuse_if(batch.over_document, "the model does not use its cache in a call over a compressed document")
            self._published = True  # the model computes all tokens, without the cache
            batch.read_nothing(None)
            if batch.images is not None:
                kwargs["mm_encoder_outputs"] = batch.features()
            inputs = prepare(input_ids, next_sequence_length=None, **kwargs)
        elif behind and not self.store.storage.specs and inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"][:, -behind:]  # states keep no cached columns
        return inputs

    def drafts_from_outputs(self) -> None:
        """Empty the cache in place, because the drafting model reads outputs of every prompt token."""
        batch = self.batch
        if batch.over_document:
            raise UnsupportedError(
                "assisted generation that drafts from the model's outputs over a compressed document"
            )
        if batch.start and batch.cache is not None:
            batch.cache.layers = self.store.make_cache(batch.room).layers
            batch.cache.activate_past_recording()
            batch.read_nothing(batch.cache)
            self._whole = True

    def compute(self, **inputs: Any) -> Any:
        """Publish prompts that are due, then run the model's own forward pass."""
        self.keep(self.batch.requests.publishes)
        self.keep(self.publish)
        ids, column = inputs.get("input_ids"), self._filled()
        if ids is not None and self.batch.cache is not None and column >= self.batch.length:
            self._passes.append((column, ids.clone()))
        with from_states() if self.store.states is not None else nullcontext():
            outputs = self._model(**inputs)
        self.add_hidden(outputs)
        self.keep(self._count, ids.shape[1] if ids is not None else inputs["inputs_embeds"].shape[1])
        return outputs

    def keep(self, step: Callable[..., object], *args: Any) -> None:
        """Call `step`, which stores results of the call. If it fails after the first token, nothing more is stored."""
        try:
            if self._keeps:
                step(*args)
        except Exception as error:
            if not self._loop.answered:
                raise
            self._keeps = False
            self._warn(error)
            self.batch.requests.close()

    def _count(self, tokens: int) -> None:
        """Count the tokens that a forward pass has computed for each row.

        Save the states of rows that end a block, except after the pass that completes the prompts.
        """
        self._computed += tokens
        batch, store = self.batch, self.store
        if not self._due and store.states is not None and batch.cache is not None:
            for prompt in batch.prompts:  # a later call can continue where a row's last token ends a block
                length = batch.start + self._computed - prompt.pad
                for row in prompt.rows if length % store.block_size == 0 else ():
                    self._decode_states[row] = (length, take_states(batch.cache, row))

    def _filled(self) -> int:
        """Return the number of columns that the cache holds."""
        batch = self.batch
        if self._loop.mode in BY_TOKEN or self.store.states is not None or batch.cache is None:
            return batch.start + self._computed
        return num_tokens(batch.cache)

    def _answers(self) -> torch.Tensor:
        """Return the tokens after the prompts from which the cache was computed, `[batch, tokens]`."""
        length = self.batch.length
        found = self.batch.loop.input_ids[:, :0]
        for column, ids in self._passes:  # assisted decoding computes a column again after it rejected a draft
            found = torch.cat([found[:, : column - length], ids], 1)
        self._passes = [(length, found)]
        return found[:, : self._filled() - length]

    @property
    def _due(self) -> bool:
        """Whether the prompts are computed, and not published yet. The caller waits for the first token before that."""
        return not self._published and self.batch.start + self._computed >= self.batch.length

    def publish(self) -> None:
        """Publish the prompts if they are due. Called before each pass and at the end."""
        if not self._due:
            return
        self._published = True
        self.batch.publish()
        self._kept = self._computed
        self._release()

    def _release(self) -> None:
        """Let layers with windows drop tokens that are in blocks, or that will never be published."""
        batch = self.batch
        if self.store.storage.chunk is None or batch.cache is None:
            return
        kept = [p.pad + batch.unwritten(p) for p in batch.prompts if self._loop.by_row and self._answers_are_kept(p)]
        mark_written(batch.cache, min(kept, default=sys.maxsize))

    def _answers_are_kept(self, prompt: Prompt) -> bool:
        """Return whether answers follow the prompt's tokens directly, without padding between them."""
        return len(prompt.tokens) > 0 and prompt.pad + len(prompt.tokens) == self.batch.length

    def keep_so_far(self, sequences: torch.Tensor) -> None:
        """Publish the answers in `sequences [batch, length]` so far, so that layers with windows can drop their tokens.

        In assisted decoding `sequences` may end in rejected drafts, so answers are only published at the end.
        """
        enough = self._computed - self._kept >= self.batch.room
        if enough and self._published and self._loop.mode in BY_TOKEN and self.store.storage.chunk is not None:
            self._kept = self._computed
            if self.intact(sequences):
                self.keep_answers(sequences, last=False)

    def add_hidden(self, outputs: Any) -> None:
        """Prepend the stored hidden states of cached tokens to the outputs of the first pass, which omits them."""
        batch = self.batch
        if batch.hidden is None or self._computed or not batch.start:
            return
        known = {row: prompt.hidden for prompt in batch.prompts for row in prompt.rows}
        outputs.hidden_states = tuple(
            torch.cat([torch.stack([known[row][number][: batch.start] for row in range(batch.size)]), layer], 1)
            for number, layer in enumerate(outputs.hidden_states)
        )

    def keep_hidden(self, steps: Any) -> None:
        """Store hidden states `steps[pass][layer] [batch, tokens, width]` of a result, the prompts' pass first."""
        batch = self.batch
        if batch.hidden is None or batch.cache is None or not steps or self._computed + batch.start < batch.length:
            return
        if not batch.requests.publishes():
            return
        for prompt in batch.prompts:
            if any(layer.dim() != 3 or layer.shape[1] != len(prompt.tokens) for layer in steps[0]):
                continue
            whole = self._loop.by_row and len(prompt.rows) == 1 and not prompt.blocks.closed
            table = prompt.blocks.tables[0]
            batch.hidden.keep(table[: prompt.blocks.written], of_steps(steps if whole else steps[:1], prompt.rows[0]))

    def intact(self, sequences: torch.Tensor) -> bool:
        """Return whether answers may be kept.

        The cache must be whole, and the model unchanged since the call began. The cache must have been computed from
        `sequences`, because logits processors and stopping criteria may write to a loop's tokens.

        If the cache lacks columns of `sequences [batch, length]`, set `storage.evicts`, so that later calls fall back.
        """
        batch = self.batch
        if batch.cache is None or not batch.publishes_answers:
            return False
        whole = not (columns(batch.cache) - {sequences.shape[1] - 1})
        self.store.storage.evicts |= not whole
        return whole and batch.requests.publishes() and self._computed_from(sequences)

    def _computed_from(self, sequences: torch.Tensor) -> bool:
        """Return whether the cache was computed from `sequences [batch, length]`, whose last column it lacks."""
        length, answers = self.batch.length, self._answers()
        prompts, width = host_copy(sequences[:, :length]), answers.shape[1]
        return torch.equal(sequences[:, length : length + width], answers) and all(
            np.array_equal(prompts[row, p.pad : p.pad + len(p.tokens)], p.tokens)
            for p in self.batch.prompts
            for row in p.rows
        )

    def keep_answers(self, sequences: torch.Tensor, last: bool = True) -> None:
        """Publish the answers of a loop. `sequences [batch, length]` has a row for each row of the cache.

        The caller has checked that they are `intact`. `last`: the answers are complete.
        """
        batch = self.batch
        generated = host_copy(sequences[:, batch.length : self._filled()])
        eos = eos_tokens(self._loop.generation_config)
        for prompt in batch.prompts:
            for row in prompt.rows if self._answers_are_kept(prompt) else ():
                self._keep_answer(prompt, row, _up_to_eos(generated[row], eos), last)
        self._release()

    def _keep_answer(self, prompt: Prompt, row: int, answer: np.ndarray, last: bool) -> None:
        """Publish the complete blocks of a row's answer. `last`: the answer is complete."""
        size, length, batch = self.store.block_size, len(prompt.tokens), self.batch
        end = (length + len(answer)) // size * size
        blocks = prompt.branches.get(row, prompt.blocks)
        if end <= max(length, blocks.written * size) or blocks.closed:
            return
        if blocks is prompt.blocks and len(prompt.rows) > 1:
            blocks = batch.requests.fork(prompt, row)
        tokens = np.concatenate((prompt.tokens, answer))
        blocks.publish(batch.cache, row, prompt.pad, tokens, end, skip=prompt.hit.later)
        boundary, states = self._decode_states.get(row, (0, None))
        if states is not None and boundary <= blocks.written * size:
            blocks.keep_states(boundary, states)
            blocks.commit(blocks.settled)
        if last and blocks is not prompt.blocks:
            batch.requests.end(blocks.request_id)

    def keep_result(self, result: Any) -> None:
        """Publish the prompts and answers of a finished loop, and keep its cache for a later call."""
        batch, loop, store = self.batch, self._loop, self.store
        sequences: torch.Tensor = result if isinstance(result, torch.Tensor) else result.sequences
        self.publish()
        whole = self.intact(sequences) if loop.by_row else batch.cache is not None
        if loop.by_row and whole:
            self.keep_answers(sequences)
        self.keep_hidden(getattr(result, "hidden_states", None))
        if not whole or batch.over_document or any(prompt.approximate for prompt in batch.prompts):
            return  # no later call may continue from an approximate cache
        if batch.by_token and result_cache(result) is batch.cache:
            record = record_of(batch.cache, store, host_copy(sequences), loop, loop.mask)
            if record is not None:
                setattr(batch.cache, CONTINUED, record)
        elif batch.alone and isinstance(result, torch.Tensor):
            store.keep_cache(batch.cache, host_copy(result[0]), loop)


def _up_to_eos(tokens: np.ndarray, eos: list[int]) -> np.ndarray:
    """Return the tokens up to the first end-of-sequence token."""
    ends = np.flatnonzero(np.isin(tokens, eos)) if eos else tokens[:0]
    return tokens[: int(ends[0]) + 1] if ends.size else tokens


def run(loop: Loop, store: PromptStore, calls: Calls) -> tuple[Any, list[Prompt]]:
    """Run a loop over copies of blocks and return its result and its prompts.

    Args:
        loop: A loop that the engine has checked.
        store: The blocks.
        calls: Gets warnings about results that could not be stored or read.

    Raises:
        UnsupportedError: The prompts do not fit, or the loop's images or cache cannot be continued.
    """
    # Made here and not in `_batch`, so that requests of an interrupted `_batch` are ended too.
    requests = PromptRequests.of(store, loop)
    try:
        batch = _batch(loop, requests)
    except OutOfBlocks as error:
        reason = "the prompt needs more blocks than there are; give a larger num_blocks"
        raise UnsupportedError(reason, str(error)) from error
    result = WatchedModel(batch, calls.warn_of_unkept).generate()
    if batch.computed_for_hidden:
        calls.warn_of_hidden(batch.computed_for_hidden, store.hidden.max_blocks or 0, store.block_size)
    return result, batch.prompts


def images_of(loop: Loop, store: PromptStore) -> RowImages | None:
    """Return the images of a loop; None if it has none.

    Raises:
        UnsupportedError: The model cannot continue from a cached prefix in a call with these images.
    """
    if loop.images is None:
        return None
    images = RowImages(loop, loop.images, store.vision)
    known = store.vision.splits
    if images.names not in known and (split := probe_images(loop, images)) is not None:
        known[images.names] = split
    return images


def _batch(loop: Loop, requests: PromptRequests) -> Batch:
    """Return the batch of a loop. Raise UnsupportedError if it cannot continue from the cache that it was given."""
    mask, store = loop.mask, requests.store
    hidden = store.hidden if _keeps_hidden(loop, store) else None
    read_cached = not loop.requested_outputs or hidden is not None
    if mask is not None and _sees_nothing(mask, loop.model.config.get_text_config(decoder=True), store.probed.windows):
        read_cached, hidden = False, None
    images = images_of(loop, store)
    if loop.continued is not None:
        alone = loop.by_token and store.states is None and images is None
        refuse_if(not (alone and read_cached) or loop.generation_config.prefill_chunk_size, OWN_CACHE)
        refuse_if(not continues(loop.continued, store, loop), OWN_CACHE)
        hidden = None  # a continued cache gives hidden states of the new tokens only
    plain = hidden is None and images is None and loop.adapters is None and loop.continued is None
    requests.anywhere = read_cached and plain
    return Batch(requests, loop, images, hidden, read_cached)


def _keeps_hidden(loop: Loop, store: PromptStore) -> bool:
    """Return whether a call's hidden states can be stored by block: each token has a block and nothing is masked."""
    return (
        loop.requested_outputs == {"output_hidden_states": True}  # all layers, and no attention weights
        and isinstance(store.manager.groups[0], FullAttention)
        and store.states is None
        and loop.mode in (*BY_TOKEN, "beam_search", "beam_sample")
        and loop.images is None
        and loop.adapters is None
        and not loop.generation_config.prefill_chunk_size
        and loop.mask is None
    )


def _sees_nothing(mask: torch.Tensor, config: Any, windows: Mapping[int, int]) -> bool:
    """Return whether a row's last token may attend to no token. Its output then depends on the masked columns."""
    seen = min(windows.values(), default=mask.shape[1])
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        seen = 1  # the last token may be the first of its chunk
    return bool((mask[:, -seen:] == 0).all(1).any())
