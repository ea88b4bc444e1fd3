"""The identity of a press: a text made of its name, settings and code, which is part of a document's key."""

from __future__ import annotations

import functools
import hashlib
import marshal
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_PLAIN = (bool, int, float, str, bytes, type(None))


def press_key(press: Any, budget: float) -> str | None:
    """Return a text that identifies a press, its settings and its code; None if a setting has no text."""
    if isinstance(press, str):
        return f"{press} {budget!r}"
    return _told(press)


def _told(value: Any) -> str | None:
    """Return a text for a plain value, a sequence or a dataclass; None for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = [_told(v) for v in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if not hasattr(type(value), "__dataclass_fields__"):
        return None
    told = {name: _told(field) for name, field in sorted(vars(value).items())}
    kind = type(value)
    return None if None in told.values() else f"{kind.__module__}.{kind.__qualname__} {_code_of(kind)} {told}"


def _code_of(kind: type) -> str:
    """Return a digest of the code of a class and of the functions of its package that it calls.

    The name is not enough, because a notebook may define a class twice.
    """
    digest, done = hashlib.sha256(), set[int]()
    waiting: list[FunctionType] = [
        f for base in kind.__mro__ for value in vars(base).values() for f in _functions(value)
    ]
    package = kind.__module__.partition(".")[0]
    while waiting:
        function = waiting.pop()
        if id(function) in done or (function.__module__ or "").partition(".")[0] != package:
            continue
        done.add(id(function))
        settings = (function.__defaults__, function.__kwdefaults__)
        digest.update(marshal.dumps(_bare(function.__code__), 2) + repr(settings).encode())
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        read = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
        for value in (*read, *cells):
            if isinstance(value, _PLAIN):
                digest.update(repr(value).encode())
            members = vars(value).values() if isinstance(value, type) else (value,)
            waiting += [f for member in members for f in _functions(member)]
    return digest.hexdigest()[:16]


def _functions(value: Any) -> list[FunctionType]:
    """Return the Python functions that a value wraps, such as a property's, and those that decorators wrap."""
    if isinstance(value, property):
        return [f for f in (value.fget, value.fset) if isinstance(f, FunctionType)]
    if isinstance(value, staticmethod | classmethod | functools.partial | functools.cached_property):
        value = value.func if hasattr(value, "func") else value.__func__
    found = []
    while isinstance(value, FunctionType):
        found.append(value)
        value = vars(value).get("__wrapped__")
    return found


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function and its nested functions read."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _bare(code: CodeType) -> CodeType:
    """Return code without file names and line numbers, which do not change what it does."""
    consts = tuple(_bare(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=consts)


def _is_filled(cell: Any) -> bool:
    """Return whether a closure's cell has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
