"""Reports, counts and warnings about calls: why a call was not served, and what the cache did for each row."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...cache import CacheManager, OutOfBlocks
from ...cache.observe.stats import CacheStats

_BETWEEN = (str(Path(__file__).parent), str(Path(warnings.__file__).parent / "contextlib.py"))
"""Files whose frames may lie between the caller and a warning, besides files of `_PACKAGES`."""
_PACKAGES = ("torch", "transformers", "peft")


class UnsupportedError(ValueError):
    """The model or the call cannot be served. Published blocks and the model are unchanged.

    Args:
        reason: The reason, in words that are the same for every call of this kind.
        detail: Details of this one call.

    Examples:
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> from pc.integrations.huggingface import UnsupportedError, enable_continuous_batching
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
        >>> model = MambaForCausalLM(MambaConfig(**sizes)).eval()
        >>> try:
        ...     handle = enable_continuous_batching(model)
        ... except UnsupportedError as error:
        ...     print(str(error).partition(":")[0], "is not served")
        MambaForCausalLM is not served
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


def refuse_if(condition: object, reason: str, detail: str = "") -> None:
    """Raise an UnsupportedError if a condition holds."""
    if condition:
        raise UnsupportedError(reason, detail)


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Convert any exception in the `with` block to an UnsupportedError."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(reason, f"{type(error).__name__}: {error}") from error


def described(error: Exception) -> str:
    """Return an error's type and message as text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def unsupported_by(error: Exception) -> UnsupportedError:
    """Return an UnsupportedError for any error, for counts and warnings. Other errors get their type as reason."""
    if isinstance(error, UnsupportedError):
        return error
    return UnsupportedError(f"it failed before the first token with {type(error).__name__}", str(error))


@dataclass(frozen=True)
class ServedStats(CacheStats):
    """The counts of `CacheStats` and counts of calls of generate.

    `hit_tokens` counts what was found for each prompt. A call may read less, as with `deterministic=True`, where it
    reads whole chunks. `last_requests` says what was read. `queried_tokens` leaves out the last token of a prompt of a
    model with recurrent states, which is always computed.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> stats = enable_prefix_caching(model, num_blocks=64).stats()
        >>> stats.calls_served, stats.calls_handed_back, stats.free_blocks
        (0, {}, 64)
    """

    calls_served: int = 0
    calls_handed_back: dict[str, int] = field(default_factory=dict)
    """Number of calls that fell back to the model's own generate, by reason."""
    repaired_tokens: int = 0
    """Number of tokens of `moved_tokens` that were computed again."""
    document_calls: int = 0
    """Number of calls of `calls_served` that read a compressed document."""


@dataclass(frozen=True)
class RequestReport:
    """The work of the cache for one row of the last call.

    Attributes:
        prompt_tokens: Number of tokens in the prompt, without padding.
        cached_tokens: Number of prompt tokens in `cached_spans`. Moved tokens are not counted.
        cached_spans: The cached ranges [start, end) of the prompt, ascending. Only `reuse="gap"` gives more than one.
        moved_spans: With `reuse="anywhere"`, ranges read from another position or computed after other text.
        repaired_tokens: Number of tokens in `moved_spans` that were computed again.

    Examples:
        >>> from pc.integrations.huggingface import RequestReport
        >>> report = RequestReport.of(100, [(0, 32), (64, 96)])
        >>> report.prompt_tokens, report.cached_tokens
        (100, 64)
    """

    prompt_tokens: int
    cached_tokens: int
    cached_spans: tuple[tuple[int, int], ...] = ()
    moved_spans: tuple[tuple[int, int], ...] = ()
    repaired_tokens: int = 0

    @property
    def moved_tokens(self) -> int:
        """Number of tokens in `moved_spans`."""
        return sum(end - start for start, end in self.moved_spans)

    def __repr__(self) -> str:
        names = [field.name for field in fields(self)][: None if self.moved_spans else 3]
        return f"RequestReport({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        cached_spans: Iterable[tuple[int, int]],
        moved_spans: Iterable[tuple[int, int]] = (),
        repaired_tokens: int = 0,
    ) -> RequestReport:
        """Return the report of a prompt of which these ranges were read. Empty ranges are dropped."""
        spans = tuple([(start, end) for start, end in cached_spans if start < end])
        known = sum(end - start for start, end in spans)
        return cls(prompt_tokens, known, spans, tuple(moved_spans), repaired_tokens)


class Calls:
    """The counts of one handle's calls, and its warnings. Each reason is warned of once, at the caller's line.

    Args:
        fallback: "warn": a call that cannot be served falls back. "raise": it raises an UnsupportedError.
        feature: The name of the feature, with which warnings begin.
        own: The method to which calls fall back, in words.
    """

    def __init__(
        self, fallback: str = "warn", feature: str = "prefix caching", own: str = "the model's own generate"
    ) -> None:
        self.raises, self._feature, self._own = fallback == "raise", feature, own
        self.served = self.repaired = self.over_documents = 0
        self.fell_back: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def serve(self, over_document: bool = False) -> None:
        """Count a call that the cache or a compressed document served."""
        with self._lock:
            self.served += 1
            self.over_documents += over_document

    def repair(self, tokens: int) -> None:
        """Count moved tokens that were computed again."""
        with self._lock:
            self.repaired += tokens

    def fall_back(self, error: Exception) -> None:
        """Count a call that falls back to the model's own generate, and warn once for each reason.

        Raises:
            UnsupportedError: The handle was made with fallback="raise".
        """
        self.raise_if_asked(error)
        unsupported = unsupported_by(error)
        with self._lock:
            self.fell_back[unsupported.reason] += 1
        self.warn_of_fallback(unsupported)

    def raise_if_asked(self, error: Exception) -> None:
        """Raise the UnsupportedError of a failure if the handle was made with fallback="raise"."""
        if self.raises:
            unsupported = unsupported_by(error)
            raise unsupported from (None if unsupported is error else error)

    def warn_of_fallback(self, error: UnsupportedError) -> None:
        """Warn once for each reason why calls fall back to the model's own generate, or why they raise."""
        does = "a call raises UnsupportedError" if self.raises else f"falls back to {self._own}"
        self.warn(error.reason, f"{does}: {error}")

    def warn_of_full(self, prompts: Iterable[Any]) -> None:
        """Warn once if there was no room for blocks of a `Prompt` or of one of its answers."""
        every = (blocks for prompt in prompts for blocks in (prompt.blocks, *prompt.branches.values()))
        full = next((blocks.full for blocks in every if blocks.full is not None), None)
        if full is not None:
            self.warn_of_failure(full)

    def warn_of_failure(self, error: Exception) -> None:
        """Warn once that an answer continues without the cache."""
        if isinstance(error, OutOfBlocks):
            self.warn("out of blocks", f"an answer is generated without the cache: {error}; give a larger num_blocks")
        else:
            self.warn("failure", f"an answer is generated without the cache: {described(error)}")

    def warn_of_unkept(self, error: Exception) -> None:
        """Warn once that an answer, though right, is not cached for later calls."""
        self.warn("unkept", f"an answer is not cached for later calls: {described(error)}")

    def warn_of_hidden(self, tokens: int, max_blocks: int, block_size: int) -> None:
        """Warn once that cached tokens were computed again because the call needs their hidden states."""
        self.warn(
            "hidden states",
            f"output_hidden_states=True: {tokens} cached tokens are computed again, because their hidden states are "
            "not cached. Only calls with that argument cache hidden states, in at most "
            f"{max_blocks} blocks of {block_size} tokens",
        )

    def warn_of_never_hits(self, name: str) -> None:
        """Warn once that there are no hits, because the model changes from call to call."""
        self.warn(
            "never hits",
            f"nothing is read from the cache: it was emptied before each of the last calls, because {name} changed. "
            "Hooks and forward passes must leave the model unchanged",
        )

    def warn(self, reason: str, text: str) -> None:
        """Warn once for each reason, at the caller's line."""
        with self._lock:
            new = reason not in self._warned
            self._warned.add(reason)
        if new:
            warnings.warn(f"{self._feature}: {text}", UserWarning, stacklevel=callers_level())

    def stats(self, store: Any) -> ServedStats:
        """Return the counts of a `PromptStore` and those of the calls. Without a store, its counts are zero."""
        counts = CacheManager(1).stats() if store is None else store.stats()
        of_cache = {f.name: getattr(counts, f.name) for f in fields(counts)}
        if store is None:
            of_cache |= {"num_blocks": 0, "free_blocks": 0}
        with self._lock:
            return ServedStats(
                **of_cache,
                calls_served=self.served,
                calls_handed_back=dict(self.fell_back),
                repaired_tokens=self.repaired,
                document_calls=self.over_documents,
            )


def callers_level() -> int:
    """Return the stacklevel of the innermost frame that belongs neither to this adapter nor to `_PACKAGES`."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if not frame.f_code.co_filename.startswith(_BETWEEN) and name not in _PACKAGES:
            break
        frame, level = frame.f_back, level + 1
    return level
