"""The identity of a press: a text that stands for a press and its settings in the key of a compressed document."""

from __future__ import annotations

from typing import Any


def press_key(press: Any, budget: float) -> str | None:
    """Return a text that identifies a press and its settings, or None if no text does."""
    if isinstance(press, str):
        return f"{press} {budget!r}"
    return _told(press)


def _told(value: Any) -> str | None:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = [_told(v) for v in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if not hasattr(type(value), "__dataclass_fields__"):
        return None
    told = {name: _told(field) for name, field in sorted(vars(value).items())}
    return None if None in told.values() else f"{type(value).__module__}.{type(value).__qualname__} {told}"
