"""The user's options, set once when caching is enabled, and settings for the calls within a `with` block."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

MAX_CPU_BYTES = 4 << 30  # the largest default size of a cache on a CPU


class CacheOptions(NamedTuple):
    """Options of a model's cache; see the arguments of `enable_prefix_caching`."""

    num_blocks: int | None
    block_size: int
    policy: Any = "default"
    reuse: str = "prefix"
    host_blocks: int = 0
    disk: str | os.PathLike[str] | None = None
    disk_bytes: int | None = None
    window_blocks: int | None = None
    recompute: float = 0.0
    fallback: str = "warn"
    chunk: int | None = None  # tokens of a deterministic chunk; None: not deterministic


def check_number(name: str, value: Any, least: int, optional: bool = False) -> None:
    """Check that an argument is an integer of at least `least`, or None if it is optional.

    Raises:
        TypeError: It is of another type.
        ValueError: It is too small.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, needs an int{' or None' if optional else ''}")
    if value < least:
        raise ValueError(f"{name}: got {value}, needs at least {least}")


def memory_budget(model: Any) -> int:
    """Return a fifth of a GPU's free memory; on a CPU, a fifth of all memory, at most 4 GiB."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0] // 5)
    if hasattr(os, "sysconf"):
        return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 5, MAX_CPU_BYTES)
    return MAX_CPU_BYTES


def default_num_blocks(model: Any, bytes_per_block: int, block_size: int, taken: int = 0) -> int:
    """Return how many blocks fit into the memory budget less `taken` bytes, at most 32 of the longest sequences."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 4096
    return max(1, min((memory_budget(model) - taken) // max(bytes_per_block, 1), 32 * -(-longest // block_size)))


_VALUES: ContextVar[Mapping[object, Any]] = ContextVar("pc_settings", default=MappingProxyType({}))
"""The value of each setting. A new thread starts with none. Tasks of asyncio and `to_thread` inherit the values."""


@contextmanager
def bound(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable within a block, then restore its value before."""
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)


def inherited_settings() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that gives another thread the settings of the caller."""
    return functools.partial(bound, _VALUES, _VALUES.get())


def value_of(setting: object) -> Any:
    """Return the value of a setting for calls of this thread or asyncio task; None if it has none."""
    return _VALUES.get().get(setting)


@contextmanager
def within(setting: object, value: Any) -> Iterator[None]:
    """Give a setting a value within a block, then the value before. Any object can identify a setting.

    Calls of the same thread or asyncio task see the value.
    """
    before = value_of(setting)
    _set(setting, value)
    try:
        yield
    finally:
        _set(setting, before)


def _set(setting: object, value: Any) -> None:
    """Set or, with None, remove a setting's value for the current thread or task."""
    others = {other: held for other, held in _VALUES.get().items() if other is not setting}
    _VALUES.set(others if value is None else others | {setting: value})


def check_salt(salt: Any) -> None:
    """Raise TypeError unless a salt is str, bytes or int."""
    if isinstance(salt, bool) or not isinstance(salt, str | bytes | int):
        raise TypeError(f"salt: got {type(salt).__name__}, needs str, bytes or int")
