"""The runner of packed passes over blocks.

The loop stays transformers' own (`_sample`), with its sampling, logits processors, stopping criteria and streamers.
`PackedRows` replaces the model in the loop. It computes the prompts, and then each next token, in packed passes: rows
of any length one after another, without padding and without cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....cache import OutOfBlocks
from ..admit import PromptRequests
from ..api import CausalLMOutputWithPast
from ..calls import Calls
from ..loop import BY_TOKEN, Loop
from ..prompts import Prompt, numbered
from ..store.blocks import RequestBlocks
from ..store.kept import PromptStore
from ..support import host_copy
from .graphs import DecodeSteps
from .packed import compute
from .rows import RowsInLoop


class PackedRows(RowsInLoop):
    """The model of a loop, with packed passes in place of its forward passes.

    If it runs out of blocks, or fails after the first token, it frees all blocks. The model's own forward pass then
    computes all tokens so far into its own cache, and continues the loop.

    Args:
        requests: Admits the prompts. The caller must hold the only strong reference.
        loop: The call.
        prompts: A prompt for each row.
        calls: Warns, if an answer continues without the cache.
        steps: Runs decode steps. Calls of all threads share its buffers, so each pass holds its lock.
    """

    def __init__(
        self, requests: PromptRequests, loop: Loop, prompts: Sequence[Prompt], calls: Calls, steps: DecodeSteps
    ) -> None:
        super().__init__(requests, loop, prompts, calls)
        self._steps = steps
        self._answers: list[Sequence[int]] = []  # for each decode step of all rows, the tokens that it computed
        self.manager, self.storage = requests.manager, requests.store.storage
        self._prefilled = self._native = False
        for prompt in prompts:
            prompt.blocks = requests.blocks(prompt)
            prompt.blocks.closed = True  # until it is admitted
        chunk = loop.generation_config.prefill_chunk_size
        blocks = (self.storage.chunk or 0) * self.storage.block_size
        self._chunk = min(bound for bound in (chunk, blocks, max(len(p.tokens) for p in prompts)) if bound)

    def generate(self) -> Any:
        """Run the loop, free the blocks, and return the result."""
        try:
            return super().generate()
        finally:
            self.close()

    def add_cache(self, result: Any) -> None:
        """Put a copy of all rows' KV into a dict result. A later call can continue it."""
        if self._native:
            return
        answers = np.array(self._answers, np.int64).reshape(-1, len(self.prompts)).T
        computed = [np.concatenate([row.tokens, answer]) for row, answer in zip(self.prompts, answers, strict=True)]
        unchanged = computed if self._loop.by_token and self._requests.publishes() else None
        self.put_cache(result, blocks=[row.blocks for row in self.prompts], computed=unchanged)

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
            logits = self._decode(input_ids) if self._prefilled else self.read_prompts()
        except Exception as error:
            if not (self._loop.answered or isinstance(error, OutOfBlocks)):
                raise
            self._calls.warn_of_failure(error)
            return self._take_over(input_ids, model_kwargs)
        self._prefilled = True
        return CausalLMOutputWithPast(logits=logits[:, None])

    def _decode(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute the last token of each row that still runs, and return logits of all rows."""
        for row, dropped in zip(self.prompts, self._criteria.dropped(len(self.prompts)), strict=True):
            if dropped:
                self.finish(row)
        active = [index for index, row in enumerate(self.prompts) if not row.blocks.closed]
        last = input_ids[:, -1].tolist()
        tokens = [last[index] for index in active]
        logits = self.decode(tokens)
        self._answers.append(tokens)
        if len(active) == len(self.prompts):
            return logits
        # A finished row's next token is padding whatever its logits are.
        every = logits.new_zeros(len(self.prompts), logits.shape[-1])
        every[active] = logits
        return every

    def _take_over(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        """Free all blocks, and compute all tokens so far by the model's own forward pass."""
        self.close()
        self._native = True
        # Without next_sequence_length, the inputs are all tokens so far. They fill the model's own cache, still empty.
        model_kwargs.pop("next_sequence_length", None)
        inputs = self._model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
        return self._model(**inputs, return_dict=True)

    def read_prompts(self) -> torch.Tensor:
        """Compute the uncached tokens of each prompt and return `[num_rows, vocabulary]` logits.

        If rows share a prefix that is not cached yet, one computes it first and the others then read it.

        Raises:
            OutOfBlocks: A prompt does not fit, even alone.
        """
        logits: dict[int, torch.Tensor] = {}
        waiting = list(range(len(self.prompts)))
        while waiting:
            admitted: list[int] = []
            for index in waiting:
                if self._admit(self.prompts[index], alone=not admitted):
                    admitted.append(index)
            computed = self._compute([self.prompts[index] for index in admitted])
            logits.update(zip(admitted, computed, strict=True))
            waiting = [index for index in waiting if index not in logits]
        return torch.stack([logits[index] for index in range(len(self.prompts))])

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append a token to each row that holds blocks, compute it, and return `[num_tokens, vocabulary]` logits.

        Raises:
            OutOfBlocks: There is no room; no row was changed.
        """
        rows, size = [row.blocks for row in self.prompts if not row.blocks.closed], self.manager.block_size
        step = self.manager.append_each([row.request_id for row in rows], np.array(tokens, np.int64))
        slots, copies = ([part] if len(self.manager.groups) == 1 else part for part in step)
        for group, (own, pairs) in enumerate(zip(slots, copies, strict=True)):
            self.storage.copy(pairs, group)
            copied = {target for _, target in pairs}
            for row, block in zip(rows, (own // size).tolist(), strict=True):
                table, place = row.tables[group], row.length // size
                if place >= len(table) or table[place] != block:
                    row.look()
                row.unsettled |= block in copied
        tables = list(zip(*(row.tables for row in rows), strict=True))
        positions = np.array([row.length for row in rows], np.int64)
        with self._steps.lock:
            check = self._requests.publishes
            logits = self._steps.run(self._model, self.storage, tables, positions, tokens, slots, check)
        for row in rows:
            row.length += 1
            if row.unsettled or row.length % size == 0:  # else nothing to publish or merge
                self._commit(row)
        return logits

    def finish(self, row: Prompt) -> None:
        """Free a row's blocks. Complete blocks stay published until they are evicted."""
        if not row.blocks.closed:
            row.blocks.closed = True
            self._requests.end(row.request_id)

    def close(self) -> None:
        """Free every row's blocks."""
        for row in self.prompts:
            row.blocks.closed = True
        if self._requests.stale:
            self._steps.drop()  # steps captured during this call may hold the changed model
        self._requests.close()

    def _admit(self, row: Prompt, alone: bool) -> bool:
        """Admit a prompt and return True, or return False if it must wait for the rows admitted before it.

        `alone`: no row was admitted before, so the prompt cannot wait.
        """
        try:
            self._requests.admit(row)
            self._hold(row)
        except OutOfBlocks:
            self._requests.end(row.request_id)
            row.blocks.closed = True
            if alone:
                raise
            return False
        if not alone and row.waits:
            self.finish(row)
            return False
        blocks = row.blocks
        if blocks.borrowed is not None:  # the request reads a part of another's block and writes the rest
            self.storage.copy([(blocks.borrowed, int(blocks.tables[0][blocks.written]))])
            blocks.borrowed = None
        blocks.length = row.hit.cached
        return True

    def _hold(self, row: Prompt) -> int:
        """Allocate the blocks of a row's next chunk and return its end."""
        end: int = min(len(row.tokens), max(row.blocks.length, row.hit.cached) + self._chunk)
        if not row.blocks.hold(row.tokens[row.blocks.held : end]) and row.blocks.full is not None:
            raise row.blocks.full
        return end

    def _compute(self, rows: list[Prompt]) -> list[torch.Tensor]:
        """Compute the uncached tokens of prompts in chunks, and return the logits of each prompt's last token."""
        logits: dict[str, torch.Tensor] = {}
        left = rows
        while left:
            ends = [self._hold(row) for row in left]
            spans = [
                (row.blocks, row.blocks.length, end - row.blocks.length) for row, end in zip(left, ends, strict=True)
            ]
            tokens = [row.tokens[row.blocks.length : end] for row, end in zip(left, ends, strict=True)]
            with self._steps.lock:
                computed = compute(self._model, self.storage, spans, tokens)
            for row, end, found in zip(left, ends, computed, strict=True):
                logits[row.request_id], row.blocks.length = found, end
                self._commit(row.blocks)
            left = [row for row in left if row.blocks.length < len(row.tokens)]
        return [logits[row.request_id] for row in rows]

    def _commit(self, blocks: RequestBlocks) -> None:
        """Publish a row's complete blocks. The next commit frees blocks that were merged into equal ones."""
        published = self._requests.publishes() and self.manager.commit(blocks.request_id, blocks.length)
        blocks.unsettled = any(published or ())
        if blocks.unsettled:
            blocks.look()


def run(loop: Loop, store: PromptStore, steps: DecodeSteps, calls: Calls) -> tuple[Any, list[Prompt]]:
    """Run a loop by packed passes and return its result and the prompt of each row."""
    steps.prepare(loop.model, (id(store), loop.extra_keys))
    prompts = row_prompts(loop)
    requests = PromptRequests.of(store, loop)
    return PackedRows(requests, loop, prompts, calls, steps).generate(), prompts


def follows(loop: Loop, has_windows: bool) -> bool:
    """Return whether packed passes support a loop. Contiguous copies serve the others."""
    mask = loop.mask
    if loop.mode not in BY_TOKEN or loop.requested_outputs or loop.has_types:
        return False
    if loop.adapters is not None or loop.images is not None or loop.continued is not None:
        return False
    if mask is None:
        return True
    padded_right, holes = not bool(mask[:, -1].all()), bool((mask.diff(dim=-1) < 0).any())
    # Windows count masked columns, and a result's cache has columns for them.
    return not (padded_right or (holes and (has_windows or loop.generation_config.return_dict_in_generate)))


def row_prompts(loop: Loop) -> list[Prompt]:
    """Return a prompt for each row of a loop, with the row's unmasked tokens."""
    ids = host_copy(loop.input_ids)
    kept = np.ones(ids.shape, bool) if loop.mask is None else host_copy(loop.mask).astype(bool)
    lines = [np.ascontiguousarray(line[keep]) for line, keep in zip(ids, kept, strict=True)]
    return [Prompt(numbered(), line, 0, [row]) for row, line in enumerate(lines)]
