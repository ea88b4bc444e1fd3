"""What callers are told of a call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestReport:
    """What the cache did for one row of the last call.

    Attributes:
        prompt_tokens: Tokens of the prompt, padding left out.
        cached_tokens: How many of them were read from the cache.

    Example:
        >>> from pc.integrations.huggingface import RequestReport
        >>> RequestReport(prompt_tokens=40, cached_tokens=32)
        RequestReport(prompt_tokens=40, cached_tokens=32)
    """

    prompt_tokens: int
    cached_tokens: int
