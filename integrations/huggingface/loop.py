"""A decoding loop of transformers, with everything that generate has prepared for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .images import Images

SHOWN = ("output_attentions", "output_hidden_states")


@dataclass
class Loop:
    """One call of generate at the moment when its loop would begin.

    Attributes:
        function: The loop, `GenerationMixin._sample` or another.
        mode: Its name, as `GenerationMode` has it.
        model: The model.
        input_ids: `[batch, length]`, rows repeated for beams and several answers.
        generation_config: As prepared.
        options: Other arguments of the loop.
        model_kwargs: Arguments of the forward pass; the cache is among them.
        own_processors: Whether the caller gave logits processors.
        adapters: PEFT's adapter of each row, where the caller named them.
        returns: Probability that the conversation goes on soon; None: unknown.
        images: What was taken out of the arguments; `model_kwargs` have no output of a vision tower then.
    """

    function: Callable[..., Any]
    mode: str
    model: Any
    input_ids: torch.Tensor
    generation_config: Any
    options: dict[str, Any]
    model_kwargs: dict[str, Any]
    own_processors: bool
    images: Images | None = None
    adapters: list[str] | None = None
    returns: float | None = None

    def run(self, model: Any = None, options: dict[str, Any] | None = None, **inputs: Any) -> Any:
        """The loop over `model`, the model itself where none is given, with some options and inputs replaced."""
        return self.function(
            self.model if model is None else model,
            self.input_ids,
            generation_config=self.generation_config,
            **self.options | (options or {}),
            **self.model_kwargs | inputs,
        )

    @property
    def shown(self) -> dict[str, Any]:
        """What of every token the caller wants to see: hidden states, attention weights."""
        config = self.generation_config
        wanted = {n: getattr(config, n, None) or self.model_kwargs.get(n) for n in SHOWN}
        return {name: value for name, value in wanted.items() if value and config.return_dict_in_generate}

    @property
    def repeats(self) -> int:
        """How often each row that the caller gave stands in `input_ids`."""
        return max(self.generation_config.num_beams or 1, self.generation_config.num_return_sequences or 1)

    @property
    def cache_name(self) -> str:
        """The name under which the model's forward takes its cache."""
        return "cache_params" if "cache_params" in self.model_kwargs else "past_key_values"

    @property
    def eos(self) -> set[int]:
        """Tokens that end an answer."""
        tokens = getattr(self.generation_config, "_eos_token_tensor", None)
        return set() if tokens is None else set(tokens.flatten().tolist())
