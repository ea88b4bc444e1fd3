"""What a caller knows of a prompt's future, in the envelope that vLLM carries for such hints (`kv_hints`).

An action of the type `retention`, version 1, has as its payload any of
`priority` (above 0), `ttl` (seconds), `token_ranges` (`[{"start", "end", "priority", "ttl"}]`, each of which falls back
to the former two) and `returns` (0 to 1: how likely the conversation goes on).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ACTION, VERSION = "retention", "1"


@dataclass(frozen=True)
class HintRange:
    """Tokens `[start, end)` of a prompt, to its end where `end` is None, kept with a priority for some seconds."""

    start: int
    end: int | None
    priority: int
    ttl: float | None


@dataclass(frozen=True)
class Hint:
    """What is known of one request.

    Attributes:
        ranges: What to keep.
        returns: The caller's probability that the conversation goes on soon; None: unknown.
    """

    ranges: tuple[HintRange, ...] = ()
    returns: float | None = None


def retention_hints(
    priority: int | None = None,
    ttl: float | None = None,
    token_ranges: Sequence[Mapping[str, Any]] = (),
    returns: float | None = None,
) -> dict[str, Any]:
    """An envelope for `SamplingParams(extra_args={"kv_hints": ...})`, or for vLLM's own `kv_hints` where it has one.

    Args:
        priority: Above 0: blocks of the prompt are kept before those of lower priority.
        ttl: Seconds after which the priority ends; None: never.
        token_ranges: `{"start", "end", "priority", "ttl"}` each, instead of the whole prompt.
        returns: How likely the conversation goes on soon, 0 to 1.

    Raises:
        ValueError: A value out of range, by name.
        TypeError: A value of another type, by name.
    """
    given = {
        "priority": priority,
        "ttl": ttl,
        "token_ranges": [dict(each) for each in token_ranges],
        "returns": returns,
    }
    payload = {key: value for key, value in given.items() if value not in (None, [])}
    _read_payload(payload)
    action = {"action_id": uuid.uuid4().hex, "action_type": ACTION, "action_version": VERSION, "payload": payload}
    return {"protocol_version": "1", "message_id": uuid.uuid4().hex, "actions": [action]}


def read_hint(request: Any) -> Hint | None:
    """The hint that a request of vLLM carries: in its `kv_hints`, else in its sampling parameters' `extra_args`.

    Returns:
        None where it carries none that is meant for an eviction policy.

    Raises:
        ValueError: A value out of range, by name.
        TypeError: A value of another type, by name.
    """
    envelope = getattr(request, "kv_hints", None)
    if envelope is None:
        extra = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
        envelope = extra.get("kv_hints")
    if envelope is None:
        return None
    hints = [_read_payload(_get(a, "payload")) for a in _get(envelope, "actions") or () if _is_retention(a)]
    if not hints:
        return None
    told = [hint.returns for hint in hints if hint.returns is not None]
    return Hint(tuple(each for hint in hints for each in hint.ranges), told[-1] if told else None)


def _get(holder: Any, name: str) -> Any:
    """A field of vLLM's structs, or of the dictionaries that they are on the wire."""
    if isinstance(holder, Mapping):
        return holder.get(name)
    if isinstance(holder, str | bytes | int | float | Sequence):
        raise TypeError(f"kv_hints: got {type(holder).__name__}, needs an envelope with {name}")
    return getattr(holder, name, None)


def _is_retention(action: Any) -> bool:
    return (_get(action, "action_type"), _get(action, "action_version")) == (ACTION, VERSION)


def _read_payload(payload: Any) -> Hint:
    if not isinstance(payload, Mapping):
        raise TypeError(f"payload: got {type(payload).__name__}, needs a mapping")
    known = ("priority", "ttl", "token_ranges", "returns")
    for name in payload:
        if name not in known:
            raise ValueError(f"payload: got {name!r}, needs some of {', '.join(known)}")
    returns = _number(payload, "returns", None)
    if returns is not None and not 0 <= returns <= 1:
        raise ValueError(f"returns: got {returns}, needs 0 to 1")
    priority, ttl = _priority(payload, None), _ttl(payload, None)
    ranges = payload.get("token_ranges")
    if ranges is None:
        ranges = [{"start": 0}] if priority is not None else []
    if not isinstance(ranges, Sequence) or isinstance(ranges, str | bytes):
        raise TypeError(f"token_ranges: got {type(ranges).__name__}, needs a list")
    return Hint(tuple(_read_range(each, priority, ttl) for each in ranges), returns)


def _read_range(given: Any, priority: int | None, ttl: float | None) -> HintRange:
    if not isinstance(given, Mapping):
        raise TypeError(f"token_ranges: got {type(given).__name__}, needs mappings with start, end, priority, ttl")
    start, end = _integer(given, "start", 0), _integer(given, "end", None)
    assert start is not None
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"token_ranges: got start {start} and end {end}, needs 0 <= start <= end")
    own = _priority(given, priority)
    if own is None:
        raise ValueError("priority: got None, needs one above 0, for each range or for all")
    return HintRange(start, end, own, _ttl(given, ttl))


def _priority(given: Mapping[str, Any], default: int | None) -> int | None:
    priority = _integer(given, "priority", default)
    if priority is not None and not 1 <= priority < 1 << 31:
        raise ValueError(f"priority: got {priority}, needs 1 to {(1 << 31) - 1}")
    return priority


def _ttl(given: Mapping[str, Any], default: float | None) -> float | None:
    ttl = _number(given, "ttl", default)
    if ttl is not None and not 0 < ttl < float("inf"):
        raise ValueError(f"ttl: got {ttl}, needs a number of seconds above 0")
    return ttl


def _integer(given: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, needs an integer")
    return value


def _number(given: Mapping[str, Any], name: str, default: float | None) -> float | None:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a number")
    return float(value)
