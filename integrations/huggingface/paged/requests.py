"""The rows of one call of generate as requests of the manager: block tables, slots and packed passes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import torch

from ....cache import OutOfBlocks
from ....cache.keys import Key
from ..store import Lease
from .graphs import DecodeSteps
from .packed import BatchRow, PackedModel, RowSpan

_request_numbers = itertools.count()


@dataclass
class Requests:
    """The rows of one call as requests of the manager; whatever happens, `close` gives their blocks back."""

    lease: Lease  # gives back what a call that is cut off leaves behind
    packed: PackedModel
    steps: DecodeSteps
    prompts: InitVar[Sequence[np.ndarray]]  # tokens of each row
    extra_keys: tuple[Any, ...] = ()  # what their KV depends on besides tokens
    salt: Key = None  # whose blocks may be shared
    chunk: int | None = None  # tokens of a row that one pass computes at most
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)  # of several threads' calls, at each pass

    def __post_init__(self, prompts: Sequence[np.ndarray]) -> None:
        self.manager = self.lease.manager
        self.rows = [BatchRow(f"generate-{next(_request_numbers)}", prompt) for prompt in prompts]

    def prefill(self) -> torch.Tensor:
        """Computes what is not cached of each prompt: `[num_rows, vocabulary]`; OutOfBlocks: one does not fit alone."""
        # Rows that share a prefix that is not cached yet go one after the other, so that it is computed once.
        logits: dict[int, torch.Tensor] = {}
        waiting = list(range(len(self.rows)))
        while waiting:
            spans: dict[int, RowSpan] = {}
            later: list[int] = []
            for index in waiting:
                span = self._admit(self.rows[index], alone=not spans)
                if span is None:
                    later.append(index)
                else:
                    spans[index] = span
            logits.update(zip(spans, self._compute(list(spans.values())), strict=True))
            waiting = later
        return torch.stack([logits[index] for index in range(len(self.rows))])

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Appends a token to each active row and computes it: `[num_active, vocabulary]`; OutOfBlocks: all are held."""
        rows, size = self.active(), self.manager.block_size
        self.lease.publishes()
        slots, copies = self.manager.append_each([row.request_id for row in rows], np.array(tokens, np.int64))
        if copies:
            self.packed.storage.copy(copies)
            copied = {target for _, target in copies}
        for row, block in zip(rows, (slots // size).tolist(), strict=True):
            if copies and block in copied:
                row.unsettled = True
            index = row.length // size
            if index >= len(row.table) or row.table[index] != block:
                row.table = self.manager.block_table(row.request_id)
        positions = np.array([row.length for row in rows], np.int64)
        with self.turn:
            logits = self.steps.run(self.packed, [row.table for row in rows], positions, tokens, slots)
        for row in rows:
            row.length += 1
            if row.unsettled or row.length % size == 0:  # between blocks there is nothing to publish or merge
                self._commit(row)
        return logits

    def active(self) -> list[BatchRow]:
        """Rows that still hold blocks."""
        return [row for row in self.rows if row.active]

    def finish(self, row: BatchRow) -> None:
        """Gives a row's blocks back; the complete ones stay published until they are evicted."""
        if row.active:
            row.active = False
            self.lease.free(row.request_id)

    def close(self) -> None:
        """Gives every row's blocks back."""
        for row in self.rows:
            row.active = False
        if self.lease.stale:
            with self.turn:
                self.steps.drop()  # a step that was captured meanwhile is another model's
        self.lease.close()

    def _admit(self, row: BatchRow, alone: bool) -> RowSpan | None:
        """Takes blocks for a prompt; None when it should wait until the rows admitted before it are computed."""
        try:
            allocation = self._allocate(row)
        except OutOfBlocks:
            if alone:
                raise
            return None
        row.active = True
        if not alone and allocation.wait_for is not None:
            self.finish(row)
            return None
        self.packed.storage.copy(allocation.copies)
        row.num_cached_tokens = allocation.num_cached_tokens
        row.length = allocation.num_cached_tokens
        row.table = self.manager.block_table(row.request_id)
        return RowSpan(row, row.tokens[row.length :], allocation.slot_mapping, row.length)

    def _allocate(self, row: BatchRow) -> Any:
        self.lease.take(row.request_id)
        try:
            return self.manager.allocate(row.request_id, row.tokens, extra_keys=self.extra_keys or None, salt=self.salt)
        except OutOfBlocks:
            self.lease.free(row.request_id)
            raise

    def _compute(self, spans: list[RowSpan]) -> list[torch.Tensor]:
        """Runs the spans, in chunks if asked to, and commits them; logits of the last token of each."""
        logits: dict[str, torch.Tensor] = {}
        longest = max(map(len, spans))
        step = self.chunk or longest
        for begin in range(0, longest, step):
            pieces = [span.piece(begin, begin + step) for span in spans if len(span) > begin]
            with self.turn:
                computed = self.packed.forward(pieces)
            for piece, row_logits in zip(pieces, computed, strict=True):
                logits[piece.row.request_id] = row_logits
        for span in spans:
            row = span.row
            row.length = span.start + len(span)
            self._commit(row)
        return [logits[span.row.request_id] for span in spans]

    def _commit(self, row: BatchRow) -> None:
        """Publishes what a row has computed; blocks that a merge replaced are free after its next commit."""
        row.unsettled = self.lease.publishes() and bool(self.manager.commit(row.request_id, row.length))
        if row.unsettled:
            row.table = self.manager.block_table(row.request_id)


def token_rows(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[np.ndarray]:
    """The tokens of each row that the attention mask leaves, int64."""
    ids = input_ids.cpu().numpy()
    if mask is None:
        return [np.ascontiguousarray(row) for row in ids]
    kept = mask.cpu().numpy().astype(bool)
    return [row[keep] for row, keep in zip(ids, kept, strict=True)]
