"""Counts of calls, served and handed back, and the warnings that go with them."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from ...cache import CacheManager
from ...cache.allocation import CacheStats

_BETWEEN = (str(Path(__file__).parent), str(Path(warnings.__file__).parent / "contextlib.py"))
"""Files between a caller's line and a warning, besides those of the packages below."""
_PACKAGES = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class ServedStats(CacheStats):
    """What `CacheStats` counts, and the calls of generate.

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
    """By reason: calls that the model's own generate served."""


class Calls:
    """Counts the calls of one handle; each reason is told once, at the line that called."""

    def __init__(self) -> None:
        self.served = 0
        self.handed_back: Counter[str] = Counter()
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Counts a call that went over the cache."""
        with self._lock:
            self.served += 1

    def hand_back(self, reason: str, detail: str = "") -> None:
        """Counts a call that the model's own generate serves, and says why the first time."""
        with self._lock:
            self.handed_back[reason] += 1
        self.tell(reason, f"{reason}{f' ({detail})' if detail else ''}. The model's own generate serves this.")

    def tell(self, reason: str, text: str) -> None:
        """Warns once for each reason."""
        with self._lock:
            new = reason not in self._told
            self._told.add(reason)
        if new:
            warnings.warn(f"prefix caching: {text}", UserWarning, stacklevel=callers_level())

    def stats(self, manager: CacheManager | None) -> ServedStats:
        """The manager's counts with those of the calls; zeros for a model without one."""
        counts = CacheManager(1).stats() if manager is None else manager.stats()
        of_cache = {f.name: getattr(counts, f.name) for f in fields(counts)}
        if manager is None:
            of_cache |= {"num_blocks": 0, "free_blocks": 0}
        with self._lock:
            return ServedStats(**of_cache, calls_served=self.served, calls_handed_back=dict(self.handed_back))


def callers_level() -> int:
    """The stacklevel of the first frame that is neither ours nor of a package that called us."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if not frame.f_code.co_filename.startswith(_BETWEEN) and name not in _PACKAGES:
            break
        frame, level = frame.f_back, level + 1
    return level
