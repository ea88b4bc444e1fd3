"""The identity of a press: a text made of its name, settings and code, which is part of a document's key."""

from __future__ import annotations

from typing import Any

from ..functions import content_digest


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
    return None if None in fields.values() else f"{name} {content_digest(kind)} {fields}"
