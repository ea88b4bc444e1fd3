"""What users choose: once when they enable caching, and for a while around some of their calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...triton_ops._checks import check_share

MAX_CPU_BYTES = 4 << 30  # bytes that a cache takes on a CPU by default at most


class CacheOptions(NamedTuple):
    """Of the cache of one model: see the arguments of `enable_prefix_caching`."""

    num_blocks: int | None
    block_size: int
    policy: Any
    reuse: str
    host_blocks: int
    disk: str | os.PathLike[str] | None
    disk_bytes: int | None
    window_blocks: int | None
    recompute: float = 0.0
    fallback: str = "warn"
    chunk: int | None = None  # whose multiples prompts are computed from; None: as it comes


def check_number(name: str, value: Any, least: int, optional: bool = False) -> None:
    """Raises TypeError or ValueError unless an argument is an integer of at least `least`, or None where allowed."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, needs an int{' or None' if optional else ''}")
    if value < least:
        raise ValueError(f"{name}: got {value}, needs at least {least}")


def memory_budget(model: Any) -> int:
    """A fifth of a device's free memory; on a CPU a fifth of all memory, at most 4 GiB."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0] // 5)
    if hasattr(os, "sysconf"):
        return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 5, MAX_CPU_BYTES)
    return MAX_CPU_BYTES


def default_num_blocks(model: Any, bytes_per_block: int, block_size: int, taken: int = 0) -> int:
    """What fits into the budget beside what is taken, and no more than 32 of the model's longest sequences need."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 4096
    return max(1, min((memory_budget(model) - taken) // max(bytes_per_block, 1), 32 * -(-longest // block_size)))


_VALUES: ContextVar[Mapping[object, Any]] = ContextVar("pc_settings", default=MappingProxyType({}))
"""What is set by which setting. A thread begins with nothing set; asyncio's tasks inherit, and so does `to_thread`."""


def inherited_settings() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that gives another thread the settings of the caller."""
    values = _VALUES.get()

    @contextmanager
    def within() -> Iterator[None]:
        before = _VALUES.get()
        _VALUES.set(values)
        try:
            yield
        finally:
            _VALUES.set(before)

    return within


class ScopedSetting:
    """A value that calls within a `with` block see, of the thread or asyncio task that is in it, and no others."""

    def __init__(self, check: Callable[[Any], None]) -> None:
        self._check = check  # raises for what is not a value of it

    @property
    def current(self) -> Any:
        """The value where it is asked for; None where there is none."""
        return _VALUES.get().get(self)

    @contextmanager
    def within(self, value: Any) -> Iterator[None]:
        """Sets it, and what it was before at the end."""
        self._check(value)
        before = self.current
        self._set(value)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, value: Any) -> None:
        others = {setting: other for setting, other in _VALUES.get().items() if setting is not self}
        _VALUES.set(others if value is None else others | {self: value})


def check_salt(salt: Any) -> None:
    """Raises TypeError for a salt that is neither str, bytes nor int."""
    if isinstance(salt, bool) or not isinstance(salt, str | bytes | int):
        raise TypeError(f"salt: got {type(salt).__name__}, needs str, bytes or int")


def check_returns(returns: Any) -> None:
    """Raises TypeError or ValueError for what is neither a probability nor None."""
    if returns is not None:
        check_share("returns", returns)
