"""What stands in for the model in transformers' decoding loops: the model itself, watched."""

from __future__ import annotations

from typing import Any

import torch

from .call import Call


class WatchedModel:
    """Passes everything on to the model; the first inputs leave out what is cached, and a call hears of every pass.

    Args:
        model: The model.
        call: What it generates for.
        chunked: Whether the loop cuts the prompt into chunks itself.
    """

    def __init__(self, model: Any, call: Call, chunked: bool) -> None:
        self._model = model
        self._call = call
        self._first = not chunked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._model)._prefill(self, *args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> Any:
        """The model's own inputs, of the tokens that the cache does not have."""
        call = self._call
        call.keep_so_far(input_ids)
        if self._first and call.start:
            next_sequence_length = input_ids.shape[1] - call.start
        self._first = False
        prepare = self._model.prepare_inputs_for_generation
        inputs = prepare(input_ids, next_sequence_length=next_sequence_length, **kwargs)
        if call.cache is not None and all(value is not call.cache for value in inputs.values()):
            call.abandon()  # the model has dropped the cache: it computes all tokens anew
            if call.pictures is not None:
                kwargs["mm_encoder_outputs"] = call.features()
            inputs = prepare(input_ids, next_sequence_length=None, **kwargs)
        return inputs

    def __call__(self, **inputs: Any) -> Any:
        """The model's own forward pass."""
        self._call.publish()
        outputs = self._model(**inputs)
        self._call.add_hidden(outputs)
        ids = inputs.get("input_ids")
        self._call.computed(ids.shape[1] if ids is not None else inputs["inputs_embeds"].shape[1])
        return outputs
