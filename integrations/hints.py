"""Retention hints. They tell an eviction policy, through an engine, what a caller knows about a prompt's future.

Both vLLM and SGLang carry such hints in an envelope, `kv_hints`. The arguments of `retention_hints` become the payload
of an action of the type `retention`, version 1.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import Logger
from typing import Any

ACTION, VERSION = "retention", "1"

MAX_RANGES = 1024
"""Maximum number of ranges in a hint. Each step in which the request allocates blocks scans all of them."""

_NUMBERS: dict[str, tuple[Any, float, float, str]] = {
    "priority": (int, 1, (1 << 31) - 1, f"an integer, 1 to {(1 << 31) - 1}"),
    "ttl": (int | float, sys.float_info.min, sys.float_info.max, "a number of seconds above 0"),
    "returns": (int | float, 0, 1, "a number from 0 to 1"),
    **dict.fromkeys(("start", "end"), (int, -sys.maxsize, sys.maxsize, "an integer")),
}
"""For each number its type, minimum, maximum, and the text of an error."""


@dataclass(frozen=True)
class HintRange:
    """Tokens `[start, end)` of a prompt to keep with a priority for `ttl` seconds. `end` None: to the prompt's end."""

    start: int
    end: int | None
    priority: int
    ttl: float | None


@dataclass(frozen=True)
class Hint:
    """A caller's hint for one request: token ranges to keep, and the probability that the conversation resumes soon."""

    ranges: tuple[HintRange, ...] = ()
    returns: float | None = None


def retention_hints(
    priority: int | None = None,
    ttl: float | None = None,
    token_ranges: Sequence[Mapping[str, Any]] = (),
    returns: float | None = None,
) -> dict[str, Any]:
    """Return a retention hint for a request's prompt, in the envelope that SGLang and vLLM accept.

    Pass the result as `kv_hints`, or to vLLM as `SamplingParams(extra_args={"kv_hints": ...})`.

    Args:
        priority: An integer above 0. Blocks of lower priority are evicted before the prompt's blocks.
        ttl: Seconds after which the priority ends; None: never.
        token_ranges: Ranges to keep instead of the whole prompt, each `{"start", "end", "priority", "ttl"}`. A range
            without `priority` or `ttl` uses the argument of that name.
        returns: The probability that the conversation resumes soon, 0 to 1.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """
    given = {"priority": priority, "ttl": ttl, "token_ranges": [*map(dict, token_ranges)], "returns": returns}
    payload = {key: value for key, value in given.items() if value not in (None, [])}
    _read_payload(payload)
    action = {"action_id": uuid.uuid4().hex, "action_type": ACTION, "action_version": VERSION, "payload": payload}
    return {"protocol_version": "1", "message_id": uuid.uuid4().hex, "actions": [action]}


def read_hint(request: Any) -> Hint | None:
    """Return the hint in an engine's request, from `kv_hints` or from the sampling parameters' `extra_args`.

    The envelope may be a JSON string, because vLLM's server accepts only scalars and lists in `vllm_xargs`. Return None
    if the request has no retention hint.

    Raises:
        TypeError: The envelope or a value in it has the wrong type.
        ValueError: A value is out of range.
    """
    envelope = getattr(request, "kv_hints", None)
    if envelope is None:
        envelope = extra_args(request).get("kv_hints")
    if envelope is None:
        return None
    if isinstance(envelope, str):  # from a client of vLLM's server
        try:
            envelope = json.loads(envelope)
        except (ValueError, RecursionError) as error:
            raise TypeError(f"kv_hints: got a string that is not JSON ({error}), needs an envelope") from error
    given = _get(envelope, "actions") or ()
    if isinstance(envelope, Mapping) and envelope and "actions" not in envelope:
        raise ValueError(f"kv_hints: got {', '.join(map(str, envelope)):.100}, needs what retention_hints() returns")
    if not isinstance(given, Sequence):
        raise TypeError(f"kv_hints: got {type(given).__name__}, needs a list of actions")
    actions = [action for action in given if _is_retention(action)]
    if not actions:
        return None
    ranges: list[HintRange] = []
    returns = None
    for action in actions:
        hint = _read_payload(_get(action, "payload"))
        ranges += hint.ranges
        _check_count(len(ranges))  # before the next action is read
        returns = returns if hint.returns is None else hint.returns
    return Hint(tuple(ranges), returns)


def extra_args(request: Any) -> Mapping[str, Any]:
    """Return the `extra_args` of a request's sampling parameters; {} if there are none."""
    return getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}


def read_or_warn(request: Any, name: str, logger: Logger) -> tuple[Hint | None, bool]:
    """Return the request's hint, and whether it is valid. If it is invalid, log why and return None as the hint.

    Args:
        request: A request of the engine.
        name: The request's name in the log.
        logger: The logger for a warning.
    """
    try:
        return read_hint(request), True
    except (TypeError, ValueError) as error:
        logger.warning("kv_hints of request %s are ignored: %s", name, error)
        return None, False


def _get(holder: Any, name: str) -> Any:
    """Return a field of an engine's struct, or of the dictionary that represents the struct in JSON."""
    if isinstance(holder, Mapping):
        return holder.get(name)
    if isinstance(holder, str | bytes | int | float | Sequence):
        raise TypeError(f"kv_hints: got {type(holder).__name__}, needs an envelope with {name}")
    return getattr(holder, name, None)


def _is_retention(action: Any) -> bool:
    return (_get(action, "action_type"), _get(action, "action_version")) == (ACTION, VERSION)


def _read_payload(payload: Any) -> Hint:
    """Return the hint in the payload of one action. Raise TypeError or ValueError if it is invalid."""
    if not isinstance(payload, Mapping):
        raise TypeError(f"payload: got {type(payload).__name__}, needs a mapping")
    known = ("priority", "ttl", "token_ranges", "returns")
    for name in payload:
        if name not in known:
            raise ValueError(f"payload: got {name!r:.100}, needs some of {', '.join(known)}")
    returns, priority, ttl = (_value(payload, name) for name in ("returns", "priority", "ttl"))
    ranges = payload.get("token_ranges")
    if ranges is None:
        ranges = [{"start": 0}] if priority is not None else []
    if not isinstance(ranges, Sequence) or isinstance(ranges, str | bytes):
        raise TypeError(f"token_ranges: got {type(ranges).__name__}, needs a list")
    _check_count(len(ranges))
    return Hint(tuple(_read_range(each, priority, ttl) for each in ranges), returns)


def _check_count(ranges: int) -> None:
    if ranges > MAX_RANGES:
        raise ValueError(f"token_ranges: got {ranges}, needs at most {MAX_RANGES}")


def _read_range(given: Any, priority: int | None, ttl: float | None) -> HintRange:
    """Return one entry of `token_ranges`. `priority` and `ttl` replace its missing values."""
    if not isinstance(given, Mapping):
        raise TypeError(f"token_ranges: got {type(given).__name__}, needs mappings with start, end, priority, ttl")
    start, end = _value(given, "start", 0), _value(given, "end")
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"token_ranges: got start {start} and end {end}, needs 0 <= start <= end")
    own = _value(given, "priority", priority)
    if own is None:
        raise ValueError("priority: got None, needs one above 0, for each range or for all")
    return HintRange(start, end, own, _value(given, "ttl", ttl))


def _value(given: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a checked number of a payload or a range, or `default` if it is absent."""
    value = given.get(name)
    if value is None:
        return default
    kind, least, most, needs = _NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, needs {needs}")
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value}, needs {needs}")
    return value
