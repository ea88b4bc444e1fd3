"""One call of generate over paged blocks: a batch becomes requests, block tables, slots and packed forward passes.

The decoding loop stays transformers' own (`_sample`): sampling, logits processors, stopping criteria and streamers are
theirs and cannot differ. `PagedDecoder` takes the model's place in that loop and answers its two questions, the
prompt's logits and the next token's, with packed passes: rows of any length behind each other, no padding, cached
tokens left out.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ....cache import CacheManager, OutOfBlocks
from ..store import Lease, Store
from ..support import UnsupportedError
from ..uninterrupted import uninterrupted
from .batch import DecodeBatch, PackedBatch, Pass
from .dispatch import no_mask
from .layers import BlockStorage, PagedCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .graphs import DecodeSteps

_request_numbers = itertools.count()


@dataclass
class Row:
    """One sequence of the batch.

    Attributes:
        request_id: Its name in the manager.
        tokens: The prompt without padding.
        num_cached_tokens: How many of them were read from the cache.
        length: Tokens whose KV is in blocks, or will be after the pass under way.
        table: Block numbers, in order; never written to, a changed table is another array.
        active: Whether it holds blocks.
        unsettled: Whether blocks were taken out of its table that are free only after its next commit.
    """

    request_id: str
    tokens: np.ndarray
    num_cached_tokens: int = 0
    length: int = 0
    table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    active: bool = False
    unsettled: bool = False


@dataclass(frozen=True)
class Span:
    """Tokens of one row to compute in one pass, at positions `start`, `start + 1`, ..."""

    row: Row
    tokens: np.ndarray
    slots: np.ndarray
    start: int

    def __len__(self) -> int:
        return len(self.tokens)

    def piece(self, begin: int, end: int) -> Span:
        """Tokens `begin` to `end` of this span."""
        return Span(self.row, self.tokens[begin:end], self.slots[begin:end], self.start + begin)


class PackedModel:
    """Runs a model's forward pass over packed rows whose keys and values are in blocks."""

    def __init__(self, model: Any, storage: BlockStorage) -> None:
        self.model = model
        self.storage = storage

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """One pass over all spans.

        Returns:
            Logits of the last token of each span, `[len(spans), vocabulary]`.

        Raises:
            UnsupportedError: The model did something the blocks cannot follow.
        """
        lens = np.array([len(span) for span in spans], np.int32)
        width = max(len(span.row.table) for span in spans)
        tables = np.full((len(spans), width), -1, np.int32)
        for line, span in zip(tables, spans, strict=True):
            line[: len(span.row.table)] = span.row.table
        batch = PackedBatch(
            slot_mapping=np.concatenate([span.slots for span in spans]),
            block_tables=tables,
            seq_lens=np.array([span.start + len(span) for span in spans], np.int32),
            query_lens=lens,
        )
        device = self.model.device
        tokens = torch.from_numpy(np.concatenate([span.tokens for span in spans])).to(device)
        positions = np.concatenate([np.arange(span.start, span.start + len(span)) for span in spans])
        last = torch.from_numpy(np.cumsum(lens, dtype=np.int64) - 1).to(device)
        keep = {"logits_to_keep": last} if self.model._supports_logits_to_keep() else {}
        logits = self._run(batch, tokens[None], torch.from_numpy(positions).to(device)[None], **keep)
        return logits if keep else logits[last.to(logits.device)]

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """The pass over the tokens written to a batch; what changes from step to step it reads from its buffers alone.

        Returns:
            Logits of all rows, padding included, `[batch.num_rows, vocabulary]`.

        Raises:
            UnsupportedError: As `forward`.
        """
        batch.begin()
        return self._run(batch, *batch.inputs(self.model.device))

    def _run(self, batch: Pass, tokens: torch.Tensor, positions: torch.Tensor, **keep: Any) -> torch.Tensor:
        cache = PagedCache(self.storage, batch)
        output = self.model(
            input_ids=tokens,
            attention_mask=no_mask(tokens.shape[1], tokens.device, cache),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **keep,
        )
        if cache.layers_attended == 0 or cache.layers_attended != len(self.storage.layers):
            raise UnsupportedError(
                f"{cache.layers_attended} of its {len(self.storage.layers)} caching layers attended through the cache"
            )
        logits: torch.Tensor = output.logits[0]
        return logits


class Requests:
    """The rows of one call as requests of the manager; whatever happens, `close` gives their blocks back.

    Args:
        manager: Whose blocks they take.
        packed: Computes them.
        steps: Runs decode steps.
        prompts: Tokens of each row.
        extra_keys: What their KV depends on besides tokens.
        chunk: Tokens of a row that one pass computes at most; None: all.
        turn: Held during each pass, so that calls of several threads take turns.
        salt: Whose blocks may be shared.
        lease: Gives back what a call that is cut off leaves behind.
    """

    def __init__(
        self,
        manager: CacheManager,
        packed: PackedModel,
        steps: DecodeSteps,
        prompts: Sequence[np.ndarray],
        extra_keys: tuple[str, ...] | None = None,
        chunk: int | None = None,
        turn: AbstractContextManager[Any] | None = None,
        salt: Any = None,
        lease: Lease | None = None,
    ) -> None:
        self.salt = salt
        self.lease = lease or Store(manager, packed.storage).lease()
        self.turn = turn or nullcontext()
        self.manager = manager
        self.packed = packed
        self.steps = steps
        self.extra_keys = extra_keys
        self.chunk = chunk
        self.rows = [Row(f"generate-{next(_request_numbers)}", prompt) for prompt in prompts]

    def prefill(self) -> torch.Tensor:
        """Computes what is not cached of every prompt; `[num_rows, vocabulary]`.

        Rows that share a prefix which nobody has cached yet go one after the other, so that it is computed once.

        Raises:
            OutOfBlocks: A prompt does not fit, even after the others were computed.
        """
        logits: dict[int, torch.Tensor] = {}
        waiting = list(range(len(self.rows)))
        while waiting:
            spans: dict[int, Span] = {}
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
        """Appends one token to each active row and computes it; `[num_active, vocabulary]`, in the order of rows.

        Raises:
            OutOfBlocks: The cache is full of blocks that this call holds.
        """
        rows, size = self.active(), self.manager.block_size
        slots, copies = uninterrupted(
            self.manager.append_each, [row.request_id for row in rows], np.array(tokens, np.int64)
        )
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

    def active(self) -> list[Row]:
        """Rows that still hold blocks."""
        return [row for row in self.rows if row.active]

    def finish(self, row: Row) -> None:
        """Gives a row's blocks back; the complete ones stay findable until they are evicted."""
        if row.active:
            row.active = False
            uninterrupted(self.lease.free, row.request_id)

    def close(self) -> None:
        """Gives every row's blocks back."""
        for row in self.rows:
            row.active = False
        uninterrupted(self.lease.close)

    def _admit(self, row: Row, alone: bool) -> Span | None:
        """Takes blocks for a prompt; None when it should wait until the rows admitted before it are computed."""
        try:
            allocation = uninterrupted(self._allocate, row)
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
        return Span(row, row.tokens[row.length :], allocation.slot_mapping, row.length)

    def _allocate(self, row: Row) -> Any:
        self.lease.take(row.request_id)
        try:
            return self.manager.allocate(row.request_id, row.tokens, extra_keys=self.extra_keys, salt=self.salt)
        except OutOfBlocks:
            self.lease.free(row.request_id)
            raise

    def _compute(self, spans: list[Span]) -> list[torch.Tensor]:
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

    def _commit(self, row: Row) -> None:
        """Makes what a row has computed findable; blocks that a merge replaced are free after its next commit."""
        row.unsettled = bool(uninterrupted(self.manager.commit, row.request_id, row.length))
        if row.unsettled:
            row.table = self.manager.block_table(row.request_id)


def prompts_of(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[np.ndarray]:
    """The tokens of each row that the attention mask leaves, int64."""
    ids = input_ids.cpu().numpy()
    if mask is None:
        return [np.ascontiguousarray(row) for row in ids]
    kept = mask.cpu().numpy().astype(bool)
    return [row[keep] for row, keep in zip(ids, kept, strict=True)]


class RecordedCriteria(StoppingCriteriaList):  # type: ignore[misc]  # transformers is untyped here
    """Stopping criteria that remember which rows have stopped."""

    finished: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """Which rows stop now, as transformers' own list says."""
        done = super().__call__(input_ids, scores, **kwargs)
        self.finished = done if self.finished is None else self.finished | done
        return done


class PagedDecoder:
    """Stands in for the model in `_sample`: everything but the forward passes is the model's.

    When it runs out of blocks it gives them all back and the model's own cache takes over, from the tokens so far.
    """

    def __init__(
        self,
        model: Any,
        requests: Requests,
        criteria: RecordedCriteria,
        drop_finished: bool,
        on_out_of_blocks: Callable[[OutOfBlocks], None],
    ) -> None:
        self._model = model
        self._requests = requests
        self._criteria = criteria
        self._drop_finished = drop_finished
        self._on_out_of_blocks = on_out_of_blocks
        self._prefilled = False
        self._native = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prefill(self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: Any, **_: Any) -> Any:
        return self(**self.prepare_inputs_for_generation(input_ids, **model_kwargs))

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **model_kwargs: Any) -> dict[str, Any]:
        """The inputs of the next `__call__`: all tokens so far, or the model's own once it has taken over."""
        if not self._native:
            return {"input_ids": input_ids, "model_kwargs": model_kwargs}
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(input_ids, **model_kwargs)
        return inputs

    def __call__(self, input_ids: torch.Tensor, model_kwargs: Any = None, **inputs: Any) -> Any:
        """Logits of every row's next token, `[batch, 1, vocabulary]`."""
        if self._native:
            return self._model(input_ids=input_ids, **inputs)
        try:
            logits = self._decode(input_ids) if self._prefilled else self._requests.prefill()
        except OutOfBlocks as error:
            self._on_out_of_blocks(error)
            return self._take_over(input_ids, model_kwargs)
        self._prefilled = True
        return CausalLMOutputWithPast(logits=logits[:, None])

    def _decode(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = self._requests.rows
        if self._drop_finished and self._criteria.finished is not None:
            for row, finished in zip(rows, self._criteria.finished.tolist(), strict=True):
                if finished:
                    self._requests.finish(row)
        active = [index for index, row in enumerate(rows) if row.active]
        last = input_ids[:, -1].tolist()
        logits = self._requests.decode([last[index] for index in active])
        if len(active) == len(rows):
            return logits
        # A finished row's next token is padding whatever its logits are.
        every = logits.new_zeros(len(rows), logits.shape[-1])
        every[active] = logits
        return every

    def _take_over(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        self._requests.close()
        self._native = True
        # Without next_sequence_length the model's own, still empty, cache is filled with all tokens so far.
        model_kwargs.pop("next_sequence_length", None)
        inputs = self._model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
        return self._model(**inputs, return_dict=True)
