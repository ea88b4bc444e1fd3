"""Which versions of an engine an adapter serves: a range, and the interfaces of it that a feature builds on.

Plugin interfaces carry no promise of stability, so a version in range is not enough: what a feature overrides or calls
has to be there with the parameters it had.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
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
    supported = _text(oldest) if oldest == newest else f"{_text(oldest)} to {_text(newest)}"
    try:
        version = str(importlib.import_module(package).__version__)
    except ImportError as error:
        wanted = f"{package.replace('_', '-')}>={_text(oldest)},<{_text((*newest[:-1], newest[-1] + 1))}"
        raise UnsupportedVersionError(f"{package}: not installed, needs {supported}; pip install '{wanted}'") from error
    if not oldest <= _release(version, len(oldest)) <= newest:
        raise UnsupportedVersionError(f"{package}: got {version}, needs {supported}")
    where = f"{package} {version} ({feature}; written for {supported})"
    for holder, members in interfaces.items():
        for name, parameters in re.findall(r"([\w.]+)(?:\(([\w ]+)\))?", members):
            _check_interface(f"{holder}{'.' if ':' in holder else ':'}{name}", parameters.split(), where)


def _text(series: Series) -> str:
    return ".".join(map(str, series))


def _release(version: str, numbers: int) -> Series:
    """Its first numbers; a version without them is out of every range."""
    from packaging.version import InvalidVersion, Version  # which every engine brings

    try:
        return Version(version).release[:numbers]
    except InvalidVersion:
        return (0,)


def _check_interface(name: str, parameters: list[str], where: str) -> None:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersionError(f"{name}: not there, needed by {where}") from error
    if parameters:
        there = inspect.signature(found).parameters
        missing = [parameter for parameter in parameters if parameter not in there]
        if missing:
            raise UnsupportedVersionError(f"{name}: has no {', '.join(missing)}, needed by {where}")
