"""Checks of the private names that an adapter uses of its framework, and functions that engines' plugins share.

An adapter's `api.py` is the only file that names anything private of the framework. It declares these names in tables,
one for each feature. It calls the functions here before the feature is enabled. A table looks like this:

    NAMES = {
        "eviction": {
            "engine.pool:Pool": "touch(blocks) take(count ...) size",
            "engine.status": "Status.RUNNING Scheduler.__init__(config)",
        },
    }

- A key is a module or `module:Class`. Its text lists the members that the adapter uses, with dots for nested members.
- `touch(blocks)`: a callable that has these parameters in this order and requires no other. A callable with
  `*args, **kwargs` is taken for a wrapper that passes them on.
- `take(count ...)`: a callable that has these parameters in any order and may require others. Use it for a class whose
  objects the adapter only reads, and for a method to which it passes on the arguments it received.
- `size`: an attribute, a field of a dataclass, or an instance attribute that a method of the class assigns.

`paths` returns where the framework has the classes and functions that tables declare, for the adapter's other files.
They import these names from `api.py`, whose `__getattr__` calls `find_or_stand_in`.
`missing(NAMES[feature])` returns the names that differ from their declaration. `changed` compares function bodies that
an adapter reimplements with the versions it was written against. `absent` checks attributes of existing objects.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import io
import os
import re
import token
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from .tested import Series, Tested, release, requirement, say_untested

_MEMBER = re.compile(r"([\w.]+)(\([^)]*\))?")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SPACE = (tokenize.COMMENT, token.NEWLINE, tokenize.NL, token.INDENT, token.DEDENT, token.ENCODING, token.ENDMARKER)


class Name(NamedTuple):
    """A name that an adapter uses, and the parameters it relies on."""

    path: str
    """`module:Class.member`."""
    parameters: tuple[str, ...] | None
    """Names of the parameters. None: the name only has to exist."""
    others: bool
    """Whether the callable may require parameters that are not listed."""


class UnsupportedVersionError(RuntimeError):
    """The error for an installed engine that an adapter was not written for.

    Examples:
        >>> from pc.integrations.vllm import UnsupportedVersionError, check_version
        >>> try:
        ...     check_version("attention")
        ... except UnsupportedVersionError as error:
        ...     reason = str(error)
    """


def names(table: Mapping[str, str]) -> Iterator[Name]:
    """Yield the names that a table declares; see the module's docstring."""
    for holder, members in table.items():
        for member, listed in _MEMBER.findall(members):
            words = listed.strip("()").split()
            parameters = tuple(word for word in words if word != "...")
            path = f"{holder}{'.' if ':' in holder else ':'}{member}"
            yield Name(path, parameters if listed else None, "..." in words)


def paths(tables: Collection[Mapping[str, str]]) -> dict[str, str]:
    """Return the paths, `module:name`, of the classes and functions that tables declare, by name.

    If tables declare a name in several modules, the first declaration counts.
    """
    found: dict[str, str] = {}
    for table in tables:
        for holder, members in table.items():
            module, _, kind = holder.partition(":")
            for name in [kind] if kind else [member.partition(".")[0] for member, _ in _MEMBER.findall(members)]:
                found.setdefault(name, f"{module}:{name}")
    return found


def find(path: str) -> Any:
    """Return the object with the name `module:name`, with dots in the name for members.

    Raises:
        ImportError: The module does not exist.
        AttributeError: The module has no such name.
    """
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def find_or_stand_in(path: str) -> Any:
    """Return the object of `find`, or an empty class if the installed framework lacks it or cannot import it."""
    try:
        return find(path)
    except Exception:
        return stand_in(path.rpartition(":")[2])


def stand_in(name: str) -> type:
    """Return an empty class in place of a class or function that the installed framework lacks."""
    return type(name, (), {"__doc__": f"{name}, which the installed framework lacks."})


def missing(table: Mapping[str, str]) -> list[str]:
    """Return a reason for each name that differs from its declaration in a table; [] if none does.

    If importing a module of the framework raises any exception, its names count as missing.
    """
    return [reason for name in names(table) if (reason := _difference(name))]


def _difference(name: Name) -> str:
    """Return how a name differs from its declaration, or ""."""
    try:
        found = find(name.path)
    except Exception as error:
        holder, _, attribute = name.path.rpartition(".")
        if name.parameters is None and ":" in holder and _assigns(holder, attribute):
            return ""
        why = "" if isinstance(error, ImportError | AttributeError) else f" ({type(error).__name__}: {error})"
        return f"{name.path}: not there{why}"
    if name.parameters is None:
        return ""
    try:
        there = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return f"{name.path}: has no parameters"
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= {parameter.kind for parameter in there}:
        return ""  # a wrapper that passes on all arguments
    lacking = [each for each in name.parameters if each not in [parameter.name for parameter in there]]
    if lacking:
        return f"{name.path}: has no {', '.join(lacking)}"
    places = [parameter.name for parameter in there if parameter.kind in _POSITIONAL]
    order = [places.index(each) for each in name.parameters if each in places]
    if order != sorted(order) and not name.others:
        return f"{name.path}: takes {', '.join(places)}, needs {', '.join(name.parameters)}"
    more = [parameter.name for parameter in there if _is_required(parameter) and parameter.name not in name.parameters]
    return f"{name.path}: also requires {', '.join(more)}" if more and not name.others else ""


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic and parameter.name not in ("self", "cls")


def _assigns(path: str, attribute: str) -> bool:
    """Return whether a class declares an instance attribute, or a method of the class assigns one."""
    try:
        kind = find(path)
    except Exception:
        return False
    for each in inspect.getmro(kind) if inspect.isclass(kind) else ():
        if attribute in getattr(each, "__annotations__", {}):
            return True
        for method in vars(each).values():
            method = inspect.unwrap(method) if callable(method) else None
            if isinstance(method, FunctionType) and attribute in _assigned(method.__code__):
                return True
    return False


@functools.cache
def _assigned(code: CodeType) -> frozenset[str]:
    """Return the names of the attributes that a function assigns on any object."""
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


def absent(objects: Mapping[str, Any], table: Mapping[str, str]) -> list[str]:
    """Return the attributes in a table that the framework's objects lack; [] if none is missing.

    Args:
        objects: The objects that exist, by name.
        table: The attributes that each path must have. A path begins with the name of an object. A number in it is an
            index: `{"scheduler.pool.blocks.0": "number is_free"}`. A path whose object is not in `objects` is left out.
    """
    reasons = []
    for path, attributes in table.items():
        root, *steps = path.split(".")
        if root not in objects:
            continue
        holder = objects[root]
        try:
            for step in steps:
                holder = holder[int(step)] if step.isdecimal() else getattr(holder, step)
        except Exception:  # an index out of range, a property that raises
            reasons.append(f"{path}: not there")
            continue
        lacking = [attribute for attribute in attributes.split() if not hasattr(holder, attribute)]
        if lacking:
            reasons.append(f"{path}: has no {', '.join(lacking)}")
    return reasons


def changed(bodies: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a reason for each body that differs from all known versions; [] if all are known.

    Args:
        bodies: For each path, `module:Class.method` or `module:Class`, the digest of its body by release,
            or by several releases.
    """
    reasons = []
    for path, known in bodies.items():
        try:
            found = digest(find(path))
        except Exception as error:  # no such name, or no source
            reasons.append(f"{path}: its source cannot be read ({type(error).__name__})")
            continue
        if found not in known.values():
            reasons.append(f"{path}: its body is not the one of {', '.join(known)} (digest {found})")
    return reasons


def print_differences(
    tables: Sequence[Mapping[str, Mapping[str, str]]], bodies: Mapping[str, Mapping[str, Mapping[str, str]]]
) -> int:
    """Print what the installed framework lacks and the digests that it changed. Return 1 if anything is printed.

    Args:
        tables: Tables of names by feature.
        bodies: Bodies by feature, as for `changed`.
    """
    found = [f"{feature}: {each}" for table in tables for feature in table for each in missing(table[feature])]
    found += [f"{feature}: {each}" for feature in bodies for each in changed(bodies[feature])]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


def digest(body: Any) -> str:
    """Return 12 hexadecimal digits for the source of a function or class.

    Comments, docstrings and spaces do not count, but nesting does. For a wrapped function, the wrapper counts.

    Raises:
        OSError: The source is not available.
    """
    function = getattr(body, "__func__", body)
    code = function.__code__ if isinstance(function, FunctionType) else function
    return _digest(code, getattr(code, "co_filename", ""))


@functools.lru_cache(256)
def _digest(code: Any, file: str) -> str:
    """Return the digest of a code object or class. `file` keeps equal code of two files apart in the cache."""
    source = inspect.getsource(code)
    lines: list[list[str]] = [[]]
    depth = -source[:1].isspace()
    for each in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += (each.type == token.INDENT) - (each.type == token.DEDENT)
        if each.type == token.NEWLINE:
            lines.append([])
        if each.type not in _SPACE:
            text = each.string
            if token.tok_name[each.type] == "FSTRING_MIDDLE":  # Python 3.12 reports doubled braces as single ones
                text = text.replace("{", "{{").replace("}", "}}")
            lines[-1] += [str(depth), text] if not lines[-1] else [text]
    kept = ["".join(line) for line in lines if line and not _is_docstring(line)]
    return sha256("\n".join(kept).encode()).hexdigest()[:12]


def _is_docstring(line: list[str]) -> bool:
    """Return whether a line `[depth, text, ...]` has one string and nothing else."""
    return len(line) == 2 and line[1].lstrip("rRuUbB")[:1] in ("'", '"')


def why_not(
    feature: str,
    package: str,
    tested: Tested,
    tables: Collection[Mapping[str, str]],
    bodies: Mapping[str, Mapping[str, str]],
    objects: Mapping[str, Any],
    attributes: Mapping[str, str],
) -> str:
    """Return why the installed release of a framework cannot serve a feature, or "".

    Args:
        feature: The name of the feature, for the message.
        package: The distribution; the module has its name with underscores.
        tested: The oldest and the newest series that was tested. An older one is refused, a newer one is tried.
        tables: Names that the feature uses, in the format of this module.
        bodies: Bodies that the feature reimplements, as for `changed`.
        objects: Objects of the framework that exist already, as for `absent`.
        attributes: The attributes that they need, as for `absent`.
    """
    try:
        version = str(importlib.import_module(package.replace("-", "_")).__version__)
    except Exception as error:
        found = "not installed" if isinstance(error, ImportError) else f"got {type(error).__name__}: {error}"
        return f"{package}: {found}, needs {tested}; pip install '{requirement(package, tested)}'"
    oldest: Series = tested.oldest
    if release(version)[: len(oldest)] < oldest:
        return f"{package}: got {version}, needs {tested}"
    reasons = [reason for table in tables for reason in missing(table)] or changed(bodies)
    reasons = reasons or absent(objects, attributes)
    return f"{'; '.join(reasons)}, needed by {package} {version} ({feature}; written for {tested})" if reasons else ""


def check_served(package: str, reason: str) -> None:
    """Raise UnsupportedVersionError if there is a reason not to serve a feature; else log if the release is untested.

    Args:
        package: The distribution of the framework.
        reason: The answer of `why_not`.
    """
    if reason:
        raise UnsupportedVersionError(reason)
    say_untested(package)


def features_in_environment(variable: str) -> list[str]:
    """Return the names that an environment variable lists, separated by commas."""
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def check_fallback(fallback: Any) -> None:
    """Raise ValueError unless `fallback` is "warn" or "raise"."""
    if not isinstance(fallback, str) or fallback not in ("warn", "raise"):
        raise ValueError(f"fallback: got {fallback!r}, needs 'warn' or 'raise'")


def check_features(
    variable: str,
    features: Collection[str],
    names: Sequence[str],
    fallback: str,
    check_version: Callable[[str], None],
) -> dict[str, str]:
    """Check that all names are features, and return why the installed engine cannot serve each of them, or "".

    Args:
        variable: The environment variable that may list the names. Errors begin with it.
        features: All features of the adapter.
        names: The features to enable.
        fallback: "warn": return the reasons. "raise": raise the first.
        check_version: Called with each name. It raises if the installed engine cannot serve that feature.

    Raises:
        ValueError: A name is no feature, or `fallback` is unknown.
        UnsupportedVersionError: With `fallback="raise"`, from `check_version`.
    """
    check_fallback(fallback)
    for name in names:
        if name not in [*features]:  # by ==: an argument without a hash is no feature either
            raise ValueError(f"{variable}: got {name!r}, needs some of {', '.join(features)}")

    def reason(name: str) -> str:
        try:
            check_version(name)
        except UnsupportedVersionError as error:
            if fallback == "raise":
                raise
            return str(error)
        return ""

    return {name: reason(name) for name in dict.fromkeys(names)}


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have `around(method, *args, **kwargs)` called in place of a method of an engine. A second call changes nothing.

    Args:
        owner: A class or module of the engine.
        name: The name of the method.
        around: Called with the engine's own method, which it calls, and with the arguments of a call.
    """
    method = getattr(owner, name)
    if not getattr(method, "wrapped_by_pc", False):

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(method, *args, **kwargs)

        wrapper.wrapped_by_pc = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)
