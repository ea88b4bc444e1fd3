"""Measure requests with and without the cache: time to first token, reused tokens, and whether the tokens agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..cache import EvictionPolicy
from ..cache.policies import PoolView
from ..cache.table import Ids

Inputs = Mapping[str, torch.Tensor]
"""Arguments of `generate` for one prompt: `input_ids` `[1, tokens]`, an attention mask, and pixels if it has images."""


@dataclass(frozen=True)
class Measurement:
    """Results of one request, which was run without and with the cache."""

    workload: str  # a key of `_report.TITLES`
    number: int  # counts from 1 in each workload
    question: str
    answer: str  # without the cache
    prompt_tokens: int
    reused_spans: tuple[tuple[int, int], ...]  # token ranges of the prompt, [start, end) each
    plain_seconds: float  # time to first token without the cache
    cached_seconds: float  # time to first token with the cache
    verdict: str  # "yes" if all tokens are the same, else the first difference and whether rounding explains it
    ok: bool  # whether the tokens are the same or rounding explains the difference

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were read from the cache."""
        return sum(end - start for start, end in self.reused_spans)

    @property
    def ratio(self) -> float:
        """Time to first token without the cache, divided by the time with it."""
        return self.plain_seconds / self.cached_seconds


class _FirstToken:
    """A streamer that records the time of the first new token. The first `put` is the prompt, the second the token."""

    def __init__(self) -> None:
        self._puts = 0
        self._start = time.perf_counter()
        self.seconds = float("nan")

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter() - self._start

    def end(self) -> None:
        """Do nothing: there is no text to flush."""


def compare_tokens(reference: list[int], got: list[int], logits: Callable[[int], torch.Tensor]) -> tuple[str, bool]:
    """Compare greedy tokens without and with the cache; return a verdict as text and whether it is acceptable.

    In float32 the tokens must be equal. In float16 and bfloat16 the first difference is acceptable if the two highest
    reference logits are closer than the rounding error of the higher one.

    Args:
        reference: Tokens without the cache.
        got: Tokens with the cache.
        logits: Returns the reference logits `[vocabulary]` of the token with a given index.
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
    """A model whose requests are run with and without its prefix cache.

    Args:
        model: A model whose `generate` uses the cache.
        handle: The handle that `enable_prefix_caching` returned for it.
        tokenizer: The model's tokenizer.
        options: Arguments of every call of `generate`.
        advance: Called before each measured call with its description, and after the call with None.
    """

    def __init__(
        self, model: Any, handle: Any, tokenizer: Any, options: Mapping[str, Any], advance: Callable[[str | None], None]
    ) -> None:
        self._model, self._handle, self._tokenizer = model, handle, tokenizer
        self._options, self._advance = options, advance
        self._plain = type(model).generate
        self.measurements: list[Measurement] = []

    def warm_up(self, inputs: Inputs) -> None:
        """Run a prompt once with and once without the cache, without measuring."""
        self._ask(self._model.generate, inputs)
        self._ask(self._generate_plain, inputs)

    def ask(self, inputs: Inputs, about: str) -> None:
        """Run a request with the cache, without measuring. `about` describes it for the progress bar."""
        self._advance(about)
        self._ask(self._model.generate, inputs)

    def measure(self, workload: str, number: int, question: str, inputs: Inputs, ends: Sequence[int] = ()) -> list[int]:
        """Run a request without and with the cache, add a `Measurement`, and return the answer without the cache.

        Args:
            workload: A key of `_report.TITLES`.
            number: Number of the request in its workload.
            question: Text of the question.
            inputs: The prompt.
            ends: Tokens that end the answer. Empty: the model's own end-of-sequence tokens.

        Returns:
            The tokens of the answer.
        """
        length = inputs["input_ids"].shape[1]
        stop = {"eos_token_id": [*ends]} if ends else {}

        def logits(index: int) -> torch.Tensor:
            options = {"return_dict_in_generate": True, "output_logits": True}
            result, _ = self._ask(self._generate_plain, inputs, **options, **stop)
            scores: torch.Tensor = result.logits[index][0].to(self._model.dtype)
            return scores

        self._advance(f"{workload} {number}, without the cache")
        expected, plain_seconds = self._ask(self._generate_plain, inputs, **stop)
        self._advance(None)
        self._advance(f"{workload} {number}, with the cache")
        got, cached_seconds = self._ask(self._model.generate, inputs, **stop)
        self._advance(None)
        answer: list[int] = expected[0, length:].tolist()
        verdict, ok = compare_tokens(answer, got[0, length:].tolist(), logits)
        spans = tuple(span for request in self._handle.last_requests for span in request.cached_spans)
        said = " ".join(self._tokenizer.decode(answer, skip_special_tokens=True).split())
        times = (plain_seconds, cached_seconds)
        self.measurements.append(Measurement(workload, number, question, said, length, spans, *times, verdict, ok))
        return answer

    def _generate_plain(self, **arguments: Any) -> Any:
        return self._plain(self._model, **arguments)

    def _ask(self, generate: Callable[..., Any], inputs: Inputs, **extra: Any) -> tuple[Any, float]:
        """Call `generate` greedily; return its result and the seconds to the first token."""
        if inputs["input_ids"].device.type == "cuda":
            torch.cuda.synchronize(inputs["input_ids"].device)
        clock = _FirstToken()
        result = generate(**inputs, do_sample=False, num_beams=1, streamer=clock, **self._options, **extra)
        return result, clock.seconds


class MiddleFirst(EvictionPolicy):
    """An eviction policy that evicts the middle of the longest prompt first, which leaves a gap.

    The default policies evict the tail of a prompt first and leave no gaps. Policies that follow hints for ranges of a
    prompt, or attention scores, do leave gaps. This policy lets the demo show `reuse="gap"`.
    """

    def bind(self, pool: PoolView) -> None:
        super().bind(pool)
        self._waiting: npt.NDArray[np.bool_] = np.zeros(pool.num_blocks, np.bool_)

    def accessed(self, ids: Ids, hit: bool) -> None:
        self._waiting[ids] = False

    def released(self, ids: Ids) -> None:
        self._waiting[ids] = True

    def victims(self, count: int) -> Ids:
        ids = self._waiting.nonzero()[0].astype(np.int32)
        place = self.pool.prefix_length[ids]
        chosen = ids[np.argsort(np.abs(2 * place - place.max(initial=0)), kind="stable")[:count]]
        self._waiting[chosen] = False
        return chosen

    def removed(self, ids: Ids) -> None:
        self._waiting[ids] = False

    def clear(self) -> None:
        self._waiting[:] = False
