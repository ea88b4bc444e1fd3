"""The versions of frameworks that our tests passed on, which bound the extras of pyproject.toml.

A test compares the table with pyproject.toml and with README. A newer version that is already installed is tried: what
an adapter uses of it is checked by name (see `seam`), and its handle or log says that nobody has tested it.

A release that passed goes into the table, and its bound into pyproject.toml; `make newest` says when there is one.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import NamedTuple

Series = tuple[int, ...]
"""The first numbers of a version: a series of two, or one release of three."""

logger = logging.getLogger("pc")


class Tested(NamedTuple):
    """The oldest and the newest series of a framework that our tests passed on."""

    oldest: Series
    newest: Series

    def __str__(self) -> str:
        return " to ".join(dict.fromkeys(text_of(series) for series in self))

    @property
    def below(self) -> Series:
        """The first series that is too new."""
        return (*self.newest[:-1], self.newest[-1] + 1)


TESTED = {
    "torch": Tested((2, 11), (2, 15)),
    "triton": Tested((3, 6), (3, 9)),
    "transformers": Tested((5, 5), (5, 24)),
    "vllm": Tested((0, 32), (0, 33)),
    "vllm-omni": Tested((0, 30), (0, 30)),
    "sglang": Tested((0, 5, 23), (0, 5, 23)),
    "kvpress": Tested((0, 5, 5), (0, 5, 5)),
}
"""By distribution."""


def text_of(series: Series) -> str:
    """Return a series as it is written, with dots."""
    return ".".join(map(str, series))


def requirement(package: str, tested: Tested | None = None) -> str:
    """Return what pip is asked for to get a tested version of a package."""
    found = TESTED[package] if tested is None else tested
    return f"{package}>={text_of(found.oldest)},<{text_of(found.below)}"


def installed(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> Series:
    """Return the numbers that a version begins with; () for one without."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def untested(package: str, version: str | None = None) -> str:
    """Return that a version is newer or older than what was tested, in words; "" if it is tested or not installed.

    Args:
        package: A key of `TESTED`.
        version: The version; None: that of the installed distribution.
    """
    version = installed(package) if version is None else version
    if version is None:
        return ""
    tested, numbers = TESTED[package], release(version)
    if numbers[: len(tested.newest)] > tested.newest:
        return f"{package} {version} is newer than {text_of(tested.newest)}, the newest that was tested"
    if numbers[: len(tested.oldest)] < tested.oldest:
        return f"{package} {version} is older than {text_of(tested.oldest)}, the oldest that was tested"
    return ""


_said: set[str] = set()


def say_untested(*packages: str) -> str | None:
    """Return which installed packages are untested, in words, and log it once; None if none is."""
    found = "; ".join(filter(None, map(untested, packages)))
    if found and found not in _said:
        _said.add(found)
        logger.warning("%s; it is tried, and whatever cannot be served falls back", found)
    return found or None
