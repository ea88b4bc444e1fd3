"""The versions of frameworks that the tests passed on. They bound the extras in pyproject.toml.

A test compares this table with pyproject.toml and README. An adapter also tries a newer version. It then checks every
name that it uses (see `seam`), and its handle or log says that the version is untested.

To add a release that passed the tests, change this table and the bound in pyproject.toml. `make newest` shows whether
there is a newer release.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import NamedTuple

Series = tuple[int, ...]
"""First numbers of a version: two for a series, three for one release."""

logger = logging.getLogger("pc")


class Tested(NamedTuple):
    """The oldest and the newest series of a framework on which the tests passed."""

    oldest: Series
    newest: Series

    def __str__(self) -> str:
        return " to ".join(dict.fromkeys(text_of(series) for series in self))

    @property
    def below(self) -> Series:
        """The first series that is untested because it is too new."""
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
"""Tested series by distribution name."""


def text_of(series: Series) -> str:
    """Return a series as text, with dots."""
    return ".".join(map(str, series))


def requirement(package: str, tested: Tested | None = None) -> str:
    """Return the requirement for pip that installs a tested version of a package."""
    found = TESTED[package] if tested is None else tested
    return f"{package}>={text_of(found.oldest)},<{text_of(found.below)}"


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> Series:
    """Return the numbers at the start of a version; () if there is none."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def untested(package: str, version: str | None = None) -> str:
    """Return a warning if a version is newer or older than all tested versions; "" if it is tested or not installed.

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
    """Log once, and return, a warning about those packages whose installed version is untested; None without any."""
    found = "; ".join(filter(None, map(untested, packages)))
    if found and found not in _said:
        _said.add(found)
        logger.warning("%s; pc tries it, and calls that it cannot serve fall back", found)
    return found or None
