"""What plugins of engines share: which features are asked for, which versions serve them, methods wrapped once.

Plugin interfaces carry no promise of stability, so a version in range is not enough: what a feature overrides or calls
has to be there with the parameters it had.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

Series = tuple[int, ...]
"""The first numbers of a version: a series of two, or one release of three."""


class UnsupportedVersionError(RuntimeError):
    """The installed engine is not one that an adapter was written for.

    Examples:
        >>> from pc.integrations.vllm import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)
    """


def features_in_environment(variable: str) -> list[str]:
    """What an environment variable names, separated by commas."""
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def check_features(
    variable: str, features: Collection[str], names: Sequence[str], check_version: Callable[[str], None]
) -> None:
    """Checks names of features, all of them before anything is switched on.

    Args:
        variable: The environment variable that may name them; errors begin with it.
        features: What there is.
        names: What is asked for.
        check_version: Raises where the installed engine does not serve a feature.

    Raises:
        ValueError: A name that is no feature.
        UnsupportedVersionError: From `check_version`.
    """
    for name in names:
        if name not in features:
            raise ValueError(f"{variable}: got {name!r}, needs some of {', '.join(features)}")
    for name in names:
        check_version(name)


def wrap_once(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `wrap(method)` in the place of an engine's method, unless it has been put there before.

    Args:
        owner: A class or module of the engine.
        name: The method's.
        wrap: Given the engine's own method, returns the one that calls it.
    """
    method = getattr(owner, name)
    if not getattr(method, "wrapped_by_pc", False):
        wrapper = functools.wraps(method)(wrap(method))
        wrapper.wrapped_by_pc = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)


def check_installed(package: str, oldest: Series, newest: Series, feature: str, interfaces: Mapping[str, str]) -> None:
    """Checks that an installed package is in range and has the interfaces that a feature builds on.

    Args:
        package: The package as it is imported.
        oldest: The first version that is served.
        newest: The last one; what comes after its numbers is free.
        feature: Named in errors.
        interfaces: By module or module:class its members, and of each the parameters relied on.

    Raises:
        UnsupportedVersionError: It is not; says what was found and what is needed.
    """
    supported = series_text(oldest, newest)
    try:
        version = str(importlib.import_module(package).__version__)
    except ImportError as error:
        behind = series_text((*newest[:-1], newest[-1] + 1))
        wanted = f"{package.replace('_', '-')}>={series_text(oldest)},<{behind}"
        raise UnsupportedVersionError(f"{package}: not installed, needs {supported}; pip install '{wanted}'") from error
    if not oldest <= release_of(version, len(oldest)) <= newest:
        raise UnsupportedVersionError(f"{package}: got {version}, needs {supported}")
    where = f"{package} {version} ({feature}; written for {supported})"
    for holder, members in interfaces.items():
        for name, parameters in re.findall(r"([\w.]+)(?:\(([\w ]+)\))?", members):
            _check_interface(f"{holder}{'.' if ':' in holder else ':'}{name}", parameters.split(), where)


def series_text(*series: Series) -> str:
    """A series as it is written, or "the first to the last" of several."""
    return " to ".join(dict.fromkeys(".".join(map(str, each)) for each in series))


def release_of(version: str, numbers: int) -> Series:
    """The first numbers of a version; one without them is out of every range."""
    from packaging.version import InvalidVersion, Version  # which every engine brings

    try:
        return Version(version).release[:numbers]
    except InvalidVersion:
        return (0,)


def find_interface(name: str) -> Any:
    """What stands under module:name, dots within; ImportError or AttributeError where nothing does."""
    module, _, path = name.partition(":")
    return attrgetter(path)(importlib.import_module(module))


def _check_interface(name: str, parameters: list[str], where: str) -> None:
    try:
        found = find_interface(name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersionError(f"{name}: not there, needed by {where}") from error
    if parameters:
        there = inspect.signature(found).parameters
        missing = [parameter for parameter in parameters if parameter not in there]
        if missing:
            raise UnsupportedVersionError(f"{name}: has no {', '.join(missing)}, needed by {where}")
