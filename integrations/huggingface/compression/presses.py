"""The identity of a press: a text made of its name, settings and code, which is part of a document's key."""

from __future__ import annotations

import hashlib
from typing import Any

from ..functions import cell_content, code_digest, functions_of, names_of

_PLAIN = (bool, int, float, str, bytes, type(None))


def press_key(press: Any, budget: float) -> str | None:
    """Return a text that identifies a press, its settings and its code; None if a setting has no text."""
    if isinstance(press, str):
        return f"{press} {budget!r}"
    return _text_of(press)


def _text_of(value: Any) -> str | None:
    """Return a text for a plain value, a sequence or a dataclass; None for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = [_text_of(v) for v in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if not hasattr(type(value), "__dataclass_fields__"):
        return None
    fields = {name: _text_of(field) for name, field in sorted(vars(value).items())}
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return None if None in fields.values() else f"{name} {_code_of(kind)} {fields}"


def _code_of(kind: type) -> str:
    """Return a digest of the code of a class and of the functions of its package that it calls.

    The name is not enough, because a notebook may define a class twice.
    """
    digest, done = hashlib.sha256(), set[int]()
    waiting = [f for base in kind.__mro__ for value in vars(base).values() for f in functions_of(value)]
    package = kind.__module__.partition(".")[0]
    while waiting:
        function = waiting.pop()
        if id(function) in done or (function.__module__ or "").partition(".")[0] != package:
            continue
        done.add(id(function))
        digest.update(code_digest(function).encode())
        waiting += functions_of(vars(function).get("__wrapped__"))
        cells = [cell_content(cell) for cell in function.__closure__ or ()]
        read = [function.__globals__[name] for name in names_of(function.__code__) if name in function.__globals__]
        for value in (*read, *cells):
            if isinstance(value, _PLAIN):
                digest.update(repr(value).encode())
            members = vars(value).values() if isinstance(value, type) else (value,)
            waiting += [f for member in members for f in functions_of(member)]
    return digest.hexdigest()[:16]
