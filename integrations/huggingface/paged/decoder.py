"""What stands in for the model in transformers' decoding loop, and answers with packed passes.

The loop stays transformers' own (`_sample`): sampling, logits processors, stopping criteria and streamers are
theirs and cannot differ. `PagedDecoder` takes the model's place in that loop and answers its two questions, the
prompt's logits and the next token's, with packed passes: rows of any length behind each other, no padding, cached
tokens left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ....cache import OutOfBlocks
from .requests import Requests


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
