"""What callers are told of a call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestReport:
    """What the cache did for one row of the last call.

    Attributes:
        prompt_tokens: Tokens of the prompt, padding left out.
        cached_tokens: How many of them were read from the cache.
        cached_spans: Which: ranges [start, end) of the prompt, ascending; more than one with `reuse="gap"` alone.

    Examples:
        >>> from pc.integrations.huggingface import RequestReport
        >>> report = RequestReport.of(100, [(0, 32), (64, 96)])
        >>> report.prompt_tokens, report.cached_tokens
        (100, 64)
    """

    prompt_tokens: int
    cached_tokens: int
    cached_spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, prompt_tokens: int, cached_spans: Iterable[tuple[int, int]]) -> RequestReport:
        """The report of a prompt of which these ranges were read; empty ones are left out."""
        spans = tuple([(start, end) for start, end in cached_spans if start < end])
        return cls(prompt_tokens, sum(end - start for start, end in spans), spans)
