"""One request, asked without and with the cache: times to first token, what was reused, and whether tokens agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Inputs = Mapping[str, torch.Tensor]
"""Arguments of `generate` that make a prompt: `input_ids` `[1, tokens]` and what goes with them."""


@dataclass(frozen=True)
class Measurement:
    """One request, asked without and with the cache.

    Attributes:
        workload: Of `_report.TITLES`.
        number: Of the request in its workload, from 1.
        prompt_tokens: Length of the prompt.
        reused_spans: Ranges [start, end) of it that were read from the cache.
        plain_seconds: Time to first token without the cache.
        cached_seconds: Time to first token with it.
        verdict: "yes" when all tokens are the same, else where they part and why that is or is not rounding.
        ok: Whether the verdict is acceptable.
    """

    workload: str
    number: int
    prompt_tokens: int
    reused_spans: tuple[tuple[int, int], ...]
    plain_seconds: float
    cached_seconds: float
    verdict: str
    ok: bool

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were read from the cache."""
        return sum(end - start for start, end in self.reused_spans)

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came with the cache."""
        return self.plain_seconds / self.cached_seconds


class _FirstToken:
    """A streamer that notes when the first token arrived; generate puts the prompt before it."""

    def __init__(self) -> None:
        self._puts = 0
        self._start = time.perf_counter()
        self.seconds = float("nan")

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter() - self._start

    def end(self) -> None:
        """Nothing is held back."""


def compare_tokens(reference: list[int], got: list[int], logits: Callable[[int], torch.Tensor]) -> tuple[str, bool]:
    """Whether two greedy answers are the same, or part only where rounding decides.

    Args:
        reference: Tokens without the cache.
        got: Tokens with it.
        logits: Gives the reference's logits `[vocabulary]` for the token at an index.

    Returns:
        What to print, and whether it is acceptable: in float32 only equal tokens are; in float16 and bfloat16 the first
        difference may lie where the two highest logits are closer than the rounding error of the higher.
    """
    if reference == got:
        return "yes", True
    pairs = zip(reference, got, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(got)))
    scores = logits(at)
    top = scores.float().topk(2).values
    gap, rounding = (top[0] - top[1]).item(), top[0].abs().item() * torch.finfo(scores.dtype).eps
    if scores.dtype != torch.float32 and gap <= rounding:
        return f"to token {at}: two logits {gap:.2g} apart, rounding {rounding:.2g}", True
    return f"NO, from token {at}", False


class Comparison:
    """Asks a served model, and the same one without the cache.

    Args:
        model: The served model.
        handle: What `enable_prefix_caching` gave for it.
        options: Of every call of `generate`.
        advance: Called before each call with what is done next, and with None behind it.

    Attributes:
        measurements: Of all requests so far.
    """

    def __init__(
        self, model: Any, handle: Any, options: Mapping[str, Any], advance: Callable[[str | None], None]
    ) -> None:
        self._model, self._handle, self._options, self._advance = model, handle, options, advance
        self._plain = type(model).generate
        self.measurements: list[Measurement] = []

    def warm_up(self, inputs: Inputs) -> None:
        """Asks once each way, unmeasured and without a step for the next call to reuse."""
        self._ask(self._model.generate, inputs)
        self._ask(self._generate_plain, inputs)

    def ask(self, inputs: Inputs, about: str) -> None:
        """One request with the cache that is not measured."""
        self._advance(about)
        self._ask(self._model.generate, inputs)

    def measure(self, workload: str, number: int, inputs: Inputs) -> list[int]:
        """One request both ways; the tokens of the answer without the cache."""
        length = inputs["input_ids"].shape[1]

        def logits(index: int) -> torch.Tensor:
            result, _ = self._ask(self._generate_plain, inputs, return_dict_in_generate=True, output_logits=True)
            scores: torch.Tensor = result.logits[index][0].to(self._model.dtype)
            return scores

        self._advance(f"{workload} {number}, without the cache")
        expected, plain_seconds = self._ask(self._generate_plain, inputs)
        self._advance(None)
        self._advance(f"{workload} {number}, with the cache")
        got, cached_seconds = self._ask(self._model.generate, inputs)
        self._advance(None)
        answer: list[int] = expected[0, length:].tolist()
        verdict, ok = compare_tokens(answer, got[0, length:].tolist(), logits)
        spans = tuple(span for request in self._handle.last_requests for span in request.cached_spans)
        self.measurements.append(
            Measurement(workload, number, length, spans, plain_seconds, cached_seconds, verdict, ok)
        )
        return answer

    def _generate_plain(self, **arguments: Any) -> Any:
        return self._plain(self._model, **arguments)

    def _ask(self, generate: Callable[..., Any], inputs: Inputs, **extra: Any) -> tuple[Any, float]:
        """Greedy answer to a prompt, and seconds to its first token."""
        if inputs["input_ids"].device.type == "cuda":
            torch.cuda.synchronize(inputs["input_ids"].device)
        clock = _FirstToken()
        result = generate(**inputs, do_sample=False, num_beams=1, streamer=clock, **self._options, **extra)
        return result, clock.seconds
