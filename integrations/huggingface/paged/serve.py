"""Serves the decoding loops of a model with packed passes over blocks.

The loop stays transformers' own (`_sample`): sampling, logits processors, stopping criteria and streamers are
theirs and cannot differ. `PagedDecoder` takes the model's place in that loop and answers its two questions, the
prompt's logits and the next token's, with packed passes: rows of any length behind each other, no padding, cached
tokens left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ....cache import CacheManager, Explanation, OutOfBlocks
from ..api import CausalLMOutputWithPast, ModelInLoop
from ..calls import Calls, RequestReport, UnsupportedError, refuse_if
from ..settings import CacheOptions, default_num_blocks
from ..store import Leases
from ..support import Loop, RecordedCriteria
from .dispatch import install
from .graphs import DecodeSteps
from .layers import PagedStorage, layer_windows
from .packed import PackedModel, probe_packed
from .requests import Requests, token_rows


class PagedDecoder(ModelInLoop):
    """Stands in for the model in `_sample`: everything but the forward passes is the model's."""

    # When it runs out of blocks, or fails behind the first token, it gives all blocks back. The model's own cache then
    # takes over, from the tokens so far.

    def __init__(
        self,
        loop: Loop,
        requests: Requests,
        criteria: RecordedCriteria,
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__(loop)
        self._requests = requests
        self._criteria = criteria
        self._on_failure = on_failure
        self._prefilled = False
        self._native = False

    def prefill(self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: Any, **_: Any) -> Any:
        """Logits behind every prompt."""
        return self(**self.prepare_inputs_for_generation(input_ids, **model_kwargs))

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **model_kwargs: Any) -> dict[str, Any]:
        """The inputs of the next `compute`: all tokens so far, or the model's own once it has taken over."""
        if not self._native:
            return {"input_ids": input_ids, "model_kwargs": model_kwargs}
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(input_ids, **model_kwargs)
        return inputs

    def compute(self, input_ids: torch.Tensor, model_kwargs: Any = None, **inputs: Any) -> Any:
        """Logits of every row's next token, `[batch, 1, vocabulary]`."""
        if self._native:
            return self._model(input_ids=input_ids, **inputs)
        try:
            logits = self._decode(input_ids) if self._prefilled else self._requests.prefill()
        except Exception as error:
            if not (self._loop.answered or isinstance(error, OutOfBlocks)):
                raise
            self._on_failure(error)
            return self._take_over(input_ids, model_kwargs)
        self._prefilled = True
        return CausalLMOutputWithPast(logits=logits[:, None])

    def _decode(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = self._requests.rows
        for row, dropped in zip(rows, self._criteria.dropped(len(rows)), strict=True):
            if dropped:
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


class PagedStore(Leases):
    """A manager and the memory of its blocks."""

    def __init__(self, manager: CacheManager, storage: PagedStorage) -> None:
        super().__init__(manager)
        self.storage = storage


class Paged:
    """One model's blocks, its decode steps, and its calls over them; UnsupportedError: it cannot be served."""

    def __init__(self, model: Any, options: CacheOptions, steps: DecodeSteps) -> None:
        self._options, self._steps, self._turn = options, steps, threading.RLock()
        size = options.block_size
        per_block = size * sum(spec.bytes_per_token for spec in probe_packed(model, size).values())
        self._num_blocks = options.num_blocks or default_num_blocks(model, per_block, size)
        self.store = self._empty_store(model)

    def _empty_store(self, model: Any) -> PagedStore:
        count, size = self._num_blocks, self._options.block_size
        manager = CacheManager(count, size, policy=self._options.policy)
        return PagedStore(manager, PagedStorage(count, size, layer_windows(model.config)))

    def empty(self, model: Any) -> None:
        """Begin anew with an empty cache; calls under way keep the blocks they have."""
        install(model)
        store = self._empty_store(model)
        with self._turn:
            self._steps.drop()
            self.store = store

    def run(self, loop: Loop, calls: Calls) -> tuple[Any, list[RequestReport]]:
        """Runs a loop over the blocks: see `Contiguous.run`."""
        check_paged(loop)
        config, store, model = loop.generation_config, self.store, loop.model
        criteria = RecordedCriteria.of(loop)
        with self._turn:
            self._steps.prepare(model, (id(store), loop.keys))
        lease, packed, chunk = (
            store.lease(loop.returns, loop.unchanged),
            PackedModel(model, store.storage),
            config.prefill_chunk_size,
        )
        prompts = token_rows(loop.input_ids, loop.mask)
        requests = Requests(lease, packed, self._steps, prompts, loop.keys, loop.salt, chunk, self._turn)
        decoder = PagedDecoder(loop, requests, criteria, calls.tell_failure)
        try:
            result = loop.run_over(decoder, criteria)
        finally:
            requests.close()
        return result, [RequestReport.of(len(r.tokens), [(0, r.num_cached_tokens)]) for r in requests.rows]

    def explain(self, loop: Loop) -> list[Explanation]:
        """Why each row of a loop is not cached further; UnsupportedError: it would not be served."""
        check_paged(loop)
        rows = token_rows(loop.input_ids, loop.mask)
        return [self.store.manager.explain(row, loop.keys, loop.salt) for row in rows]


def check_paged(loop: Loop) -> None:
    """Raises UnsupportedError for a loop that packed passes cannot follow."""
    refuse_if(loop.mode not in ("greedy_search", "sample"), f"generation mode {loop.mode}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(loop.generation_config, name, False) or loop.model_kwargs.get(name):
            raise UnsupportedError(f"{name}=True needs tensors that are not there for cached tokens")
    refuse_if(loop.adapters is not None, "packed passes know no rows that adapters could be named for")
    refuse_if(loop.images is not None, "packed passes take no images")
    mask = loop.mask
    if mask is None:
        return
    refuse_if(not bool(mask[:, -1].all()), "the batch is padded on the right")
    if layer_windows(loop.model.config) and bool((mask.diff(dim=-1) < 0).any()):
        raise UnsupportedError("windows are counted over the holes of its attention_mask")
