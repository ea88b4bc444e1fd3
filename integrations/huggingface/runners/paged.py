"""The runner of packed passes over blocks.

The loop stays transformers' own (`_sample`), with its sampling, logits processors, stopping criteria and streamers.
`PagedDecoder` replaces the model in the loop. It computes the prompts, and then each next token, in packed passes: rows
of any length one after another, without padding and without cached tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....cache import OutOfBlocks
from ..admit import PromptRequests
from ..api import CausalLMOutputWithPast, ModelInLoop
from ..calls import Calls
from ..loop import BY_TOKEN, Loop, RecordedCriteria
from ..prompts import Prompt, numbered
from ..store.kept import ContiguousStore
from .graphs import DecodeSteps
from .packed import PackedModel, Span


@dataclass
class PackedRow:
    """One row of a call, with a request of its own."""

    prompt: Prompt
    length: int = 0  # number of tokens whose KV is in blocks after the current pass
    active: bool = False  # whether it holds blocks
    unsettled: bool = False  # whether its next commit frees blocks that a copy or merge replaced


class PackedRows:
    """The rows of one call. `close` frees all of their blocks.

    Args:
        requests: Admits their prompts.
        packed: The model.
        steps: Runs decode steps.
        prompts: A prompt for each row.
        chunk: Maximum number of tokens of a row in one pass. None: no limit.
        turn: A lock to hold during each pass, because calls of all threads share buffers.
    """

    def __init__(
        self,
        requests: PromptRequests,
        packed: PackedModel,
        steps: DecodeSteps,
        prompts: Sequence[Prompt],
        chunk: int | None = None,
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        self._requests, self._packed, self._steps = requests, packed, steps
        self._turn = nullcontext() if turn is None else turn
        self.manager, storage = requests.store.manager, packed.storage
        self.rows = [PackedRow(prompt) for prompt in prompts]
        for prompt in prompts:
            prompt.blocks = requests.blocks(prompt)
        bounds = [chunk, storage.chunk and storage.chunk * storage.block_size, max(len(p.tokens) for p in prompts)]
        self._chunk = min(bound for bound in bounds if bound)

    def prefill(self) -> torch.Tensor:
        """Compute the uncached tokens of each prompt and return `[num_rows, vocabulary]` logits.

        If rows share a prefix that is not cached yet, one computes it first and the others then read it.

        Raises:
            OutOfBlocks: A prompt does not fit, even alone.
        """
        logits: dict[int, torch.Tensor] = {}
        waiting = list(range(len(self.rows)))
        while waiting:
            admitted: list[int] = []
            for index in waiting:
                if self._admit(self.rows[index], alone=not admitted):
                    admitted.append(index)
            computed = self._compute([self.rows[index] for index in admitted])
            logits.update(zip(admitted, computed, strict=True))
            waiting = [index for index in waiting if index not in logits]
        return torch.stack([logits[index] for index in range(len(self.rows))])

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each active row, compute it, and return `[num_active, vocabulary]` logits.

        Raises:
            OutOfBlocks: There is no room; no row was changed.
        """
        rows, size = self.active(), self.manager.block_size
        self._requests.publishes()
        step = self.manager.append_each([row.prompt.request_id for row in rows], np.array(tokens, np.int64))
        slots, copies = ([part] if len(self.manager.groups) == 1 else part for part in step)
        for group, (own, pairs) in enumerate(zip(slots, copies, strict=True)):
            self._packed.storage.copy(pairs, group)
            copied = {target for _, target in pairs}
            for row, block in zip(rows, (own // size).tolist(), strict=True):
                table, place = row.prompt.blocks.tables[group], row.length // size
                if place >= len(table) or table[place] != block:
                    row.prompt.blocks.look()
                row.unsettled |= block in copied
        tables = list(zip(*(row.prompt.blocks.tables for row in rows), strict=True))
        positions = np.array([row.length for row in rows], np.int64)
        with self._turn:
            logits = self._steps.run(self._packed, tables, positions, tokens, slots)
        for row in rows:
            row.length += 1
            if row.unsettled or row.length % size == 0:  # else nothing to publish or merge
                self._commit(row)
        return logits

    def active(self) -> list[PackedRow]:
        """Return the rows that hold blocks."""
        return [row for row in self.rows if row.active]

    def finish(self, row: PackedRow) -> None:
        """Free a row's blocks. Complete blocks stay published until they are evicted."""
        if row.active:
            row.active = False
            self._requests.end(row.prompt.blocks)

    def close(self) -> None:
        """Free every row's blocks."""
        for row in self.rows:
            row.active = False
        if self._requests.stale:
            with self._turn:
                self._steps.drop()  # steps captured during this call may hold the changed model
        self._requests.close()

    def _admit(self, row: PackedRow, alone: bool) -> bool:
        """Admit a row's prompt and return True, or return False if it must wait for the rows admitted before it.

        `alone`: no row was admitted before, so the prompt cannot wait.
        """
        prompt = row.prompt
        row.active = True
        try:
            self._requests.admit(prompt)
            self._hold(row)
        except OutOfBlocks:
            self._requests.end(prompt.blocks)
            row.active = False
            if alone:
                raise
            return False
        if not alone and prompt.waits:
            self.finish(row)
            return False
        blocks = prompt.blocks
        if blocks.borrowed is not None:  # the request reads a part of another's block and writes the rest
            self._packed.storage.copy([(blocks.borrowed, int(blocks.tables[0][blocks.written]))])
            blocks.borrowed = None
        row.length = prompt.reused.cached
        return True

    def _hold(self, row: PackedRow) -> int:
        """Allocate the blocks of a row's next chunk and return its end."""
        tokens, blocks = row.prompt.tokens, row.prompt.blocks
        end = min(len(tokens), max(row.length, row.prompt.reused.cached) + self._chunk)
        if not blocks.hold(tokens, end) and blocks.full is not None:
            raise blocks.full
        return end

    def _compute(self, rows: list[PackedRow]) -> list[torch.Tensor]:
        """Compute the uncached tokens of prompts in chunks, and return the logits of each prompt's last token."""
        logits: dict[str, torch.Tensor] = {}
        left = rows
        while left:
            spans, tokens = [], []
            for row in left:
                prompt, end = row.prompt, self._hold(row)
                blocks, length = prompt.blocks, end - row.length
                spans.append(Span(prompt.request_id, blocks.tables, row.length, length, blocks.known))
                tokens.append(prompt.tokens[row.length : end])
            with self._turn:
                computed = self._packed.forward(spans, tokens)
            for row, span, found in zip(left, spans, computed, strict=True):
                logits[span.key] = found
                row.length += span.length
                self._commit(row)
            left = [row for row in left if row.length < len(row.prompt.tokens)]
        return [logits[row.prompt.request_id] for row in rows]

    def _commit(self, row: PackedRow) -> None:
        """Publish a row's complete blocks. The next commit frees blocks that were merged into equal ones."""
        row.unsettled = self._requests.publishes() and any(self.manager.commit(row.prompt.request_id, row.length))
        if row.unsettled:
            row.prompt.blocks.look()


class PagedDecoder(ModelInLoop):
    """The model of a loop, with packed passes in place of its forward passes.

    If it runs out of blocks, or fails after the first token, it frees all blocks. The model's own forward pass then
    computes all tokens so far into its own cache, and continues the loop.
    """

    def __init__(
        self, loop: Loop, rows: PackedRows, criteria: RecordedCriteria, on_failure: Callable[[Exception], None]
    ) -> None:
        super().__init__(loop)
        self._rows, self._criteria, self._on_failure = rows, criteria, on_failure
        self._prefilled = self._native = False

    def prefill(self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: Any, **_: Any) -> Any:
        """Return the logits of the last token of every prompt."""
        return self(**self.prepare_inputs_for_generation(input_ids, **model_kwargs))

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **model_kwargs: Any) -> dict[str, Any]:
        """Return the inputs of the next `compute`: all tokens so far, or the model's own inputs after a failure."""
        if not self._native:
            return {"input_ids": input_ids, "model_kwargs": model_kwargs}
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(input_ids, **model_kwargs)
        return inputs

    def compute(self, input_ids: torch.Tensor, model_kwargs: Any = None, **inputs: Any) -> Any:
        """Return the logits of every row's next token, `[batch, 1, vocabulary]`."""
        if self._native:
            return self._model(input_ids=input_ids, **inputs)
        try:
            logits = self._decode(input_ids) if self._prefilled else self._rows.prefill()
        except Exception as error:
            if not (self._loop.answered or isinstance(error, OutOfBlocks)):
                raise
            self._on_failure(error)
            return self._take_over(input_ids, model_kwargs)
        self._prefilled = True
        return CausalLMOutputWithPast(logits=logits[:, None])

    def _decode(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute the last token of each row that still runs, and return logits of all rows."""
        rows = self._rows.rows
        for row, dropped in zip(rows, self._criteria.dropped(len(rows)), strict=True):
            if dropped:
                self._rows.finish(row)
        active = [index for index, row in enumerate(rows) if row.active]
        last = input_ids[:, -1].tolist()
        logits = self._rows.decode([last[index] for index in active])
        if len(active) == len(rows):
            return logits
        # A finished row's next token is padding whatever its logits are.
        every = logits.new_zeros(len(rows), logits.shape[-1])
        every[active] = logits
        return every

    def _take_over(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        """Free all blocks, and compute all tokens so far by the model's own forward pass."""
        self._rows.close()
        self._native = True
        # Without next_sequence_length the model's own, still empty, cache is filled with all tokens so far.
        model_kwargs.pop("next_sequence_length", None)
        inputs = self._model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
        return self._model(**inputs, return_dict=True)


class PackedRunner:
    """A runner of one model's loops by packed passes. Calls of all threads share its decode steps."""

    def __init__(self, steps: DecodeSteps) -> None:
        self._steps, self._turn = steps, threading.RLock()

    def drop(self) -> None:
        """Drop captured steps and their buffers, because the store is replaced."""
        with self._turn:
            self._steps.drop()

    def run(self, loop: Loop, store: ContiguousStore, calls: Calls) -> tuple[Any, list[Prompt]]:
        """Run a loop and return its result and the prompt of each row."""
        criteria, model = RecordedCriteria.of(loop), loop.model
        with self._turn:
            self._steps.prepare(model, (id(store), loop.extra_keys))
        lease = store.lease(loop.returns, loop.unchanged)
        requests, packed = PromptRequests(store, loop, lease), PackedModel(model, store.storage)
        chunk = loop.generation_config.prefill_chunk_size
        rows = PackedRows(requests, packed, self._steps, row_prompts(loop), chunk, self._turn)
        decoder = PagedDecoder(loop, rows, criteria, calls.tell_failure)
        try:
            result = loop.run_over(decoder, criteria)
        finally:
            rows.close()
        return result, [row.prompt for row in rows.rows]


def follows(loop: Loop, has_windows: bool) -> bool:
    """Return whether packed passes support a loop. Contiguous copies serve the others."""
    config, mask = loop.generation_config, loop.mask
    names = ("output_attentions", "output_hidden_states")
    if loop.mode not in BY_TOKEN or any(getattr(config, n, False) or loop.model_kwargs.get(n) for n in names):
        return False
    if loop.adapters is not None or loop.images is not None or loop.continued is not None:
        return False
    if mask is None:
        return True
    padded_right = not bool(mask[:, -1].all())
    return not (padded_right or (has_windows and bool((mask.diff(dim=-1) < 0).any())))  # windows count masked columns


def row_prompts(loop: Loop) -> list[Prompt]:
    """Return a prompt for each row of a loop, with the row's unmasked tokens."""
    ids = loop.input_ids.cpu().numpy()
    kept = np.ones(ids.shape, bool) if loop.mask is None else loop.mask.cpu().numpy().astype(bool)
    lines = [np.ascontiguousarray(line[keep]) for line, keep in zip(ids, kept, strict=True)]
    return [Prompt(numbered(), line, 0, [row]) for row, line in enumerate(lines)]
