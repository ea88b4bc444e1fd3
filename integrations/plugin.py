"""Functions that engine plugins share: read feature names, check versions, and wrap a method once.

Engines do not promise stable plugin interfaces, so checking the version is not enough. Each name that a feature
overrides or calls must exist with the parameters that the feature uses.
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
"""First numbers of a version: two for a series, three for one release."""


class UnsupportedVersionError(RuntimeError):
    """The installed engine's version, or an interface of it, is not one that the adapter supports.

    Examples:
        >>> from pc.integrations.vllm import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)
    """


def features_in_environment(variable: str) -> list[str]:
    """Return the feature names in an environment variable, which separates them by commas."""
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def check_features(
    variable: str, features: Collection[str], names: Sequence[str], check_version: Callable[[str], None]
) -> None:
    """Check the names of all requested features before any is enabled.

    Args:
        variable: The environment variable that may name features; error messages begin with it.
        features: Names of all features.
        names: Names of the requested features.
        check_version: Called with each requested feature; raises if the installed engine cannot serve it.

    Raises:
        ValueError: A name is not a feature.
        UnsupportedVersionError: From `check_version`.
    """
    for name in names:
        if name not in features:
            raise ValueError(f"{variable}: got {name!r}, needs some of {', '.join(features)}")
    for name in names:
        check_version(name)


def wrap_once(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of an engine with `wrap(method)`, unless this has been done before.

    Args:
        owner: A class or module of the engine.
        name: Name of the method.
        wrap: Takes the engine's own method and returns one that calls it.
    """
    method = getattr(owner, name)
    if not getattr(method, "wrapped_by_pc", False):
        wrapper = functools.wraps(method)(wrap(method))
        wrapper.wrapped_by_pc = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)


def check_installed(package: str, oldest: Series, newest: Series, feature: str, interfaces: Mapping[str, str]) -> None:
    """Check that an installed package has a supported version and the interfaces that a feature uses.

    Args:
        package: The package's import name.
        oldest: The oldest supported version.
        newest: The newest supported version. Only as many numbers as it has are compared.
        feature: Name of the feature, for errors.
        interfaces: For each module or module:class, its members and the parameters that the feature uses.

    Raises:
        UnsupportedVersionError: The package is absent, has another version or lacks an interface.
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
    """Return series as text, with dots: one series, or "first to last"."""
    return " to ".join(dict.fromkeys(".".join(map(str, each)) for each in series))


def release_of(version: str, numbers: int) -> Series:
    """Return the first `numbers` numbers of a version; (0,) if the text is not a version."""
    from packaging.version import InvalidVersion, Version  # which every engine brings

    try:
        return Version(version).release[:numbers]
    except InvalidVersion:
        return (0,)


def find_interface(name: str) -> Any:
    """Return the object with the name `module:attribute`, with dots in the attribute for members.

    Raises:
        ImportError: The module does not exist.
        AttributeError: The module has no such attribute.
    """
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
