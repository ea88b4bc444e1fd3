"""vLLM's schedulers with an eviction policy behind their block pool, and what callers know of a prompt's future.

Such hints come in the envelope that vLLM carries for them (`kv_hints`): the arguments of `retention_hints` are the
payload of an action of the type `retention`, version 1.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ..features import LOGGER, announce, chosen_policy
from .pool import PolicyBlockPool, install_policy

logger = init_logger(LOGGER)

PEEKING = ("SimpleCPUOffloadConnector",)
"""Connectors of vLLM that walk through the queue of free blocks ahead of time."""

ACTION, VERSION = "retention", "1"

MAX_RANGES = 1024
"""Of one hint: they are looked at in every step in which its request gets blocks."""

_NUMBERS: dict[str, tuple[Any, float, float, str]] = {
    "priority": (int, 1, (1 << 31) - 1, f"an integer, 1 to {(1 << 31) - 1}"),
    "ttl": (int | float, sys.float_info.min, sys.float_info.max, "a number of seconds above 0"),
    "returns": (int | float, 0, 1, "a number from 0 to 1"),
    **dict.fromkeys(("start", "end"), (int, -sys.maxsize, sys.maxsize, "an integer")),
}
"""By name: type, least and largest value, and how an error says so."""


@dataclass(frozen=True)
class HintRange:
    """Tokens `[start, end)` of a prompt, to its end where `end` is None, kept with a priority for some seconds."""

    start: int
    end: int | None
    priority: int
    ttl: float | None


@dataclass(frozen=True)
class Hint:
    """What is known of one request: what to keep, and how likely the conversation goes on soon (None: unknown)."""

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
        token_ranges: `{"start", "end", "priority", "ttl"}` each, instead of the whole prompt; the latter two fall back
            to the arguments.
        returns: How likely the conversation goes on soon, 0 to 1.

    Raises ValueError for a value out of range and TypeError for one of another type, by name.
    """
    given = {"priority": priority, "ttl": ttl, "token_ranges": [*map(dict, token_ranges)], "returns": returns}
    payload = {key: value for key, value in given.items() if value not in (None, [])}
    _read_payload(payload)
    action = {"action_id": uuid.uuid4().hex, "action_type": ACTION, "action_version": VERSION, "payload": payload}
    return {"protocol_version": "1", "message_id": uuid.uuid4().hex, "actions": [action]}


def read_hint(request: Any) -> Hint | None:
    """The hint that a request of vLLM carries: in its `kv_hints`, else in its sampling parameters' `extra_args`.

    The envelope may be a string of JSON, since the server takes none but scalars and lists in `vllm_xargs`. None where
    there is no hint for an eviction policy; raises as `retention_hints`.
    """
    envelope = getattr(request, "kv_hints", None)
    if envelope is None:
        extra = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
        envelope = extra.get("kv_hints")
    if envelope is None:
        return None
    if isinstance(envelope, str):  # all that a client of vLLM's server can send
        try:
            envelope = json.loads(envelope)
        except (ValueError, RecursionError) as error:
            raise TypeError(f"kv_hints: got a string that is no JSON ({error}), needs an envelope") from error
    hints = [_read_payload(_get(a, "payload")) for a in _get(envelope, "actions") or () if _is_retention(a)]
    if not hints:
        return None
    returns = [hint.returns for hint in hints if hint.returns is not None]
    return Hint(tuple(each for hint in hints for each in hint.ranges), returns[-1] if returns else None)


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
    returns, priority, ttl = (_value(payload, name) for name in ("returns", "priority", "ttl"))
    ranges = payload.get("token_ranges")
    if ranges is None:
        ranges = [{"start": 0}] if priority is not None else []
    if not isinstance(ranges, Sequence) or isinstance(ranges, str | bytes):
        raise TypeError(f"token_ranges: got {type(ranges).__name__}, needs a list")
    if len(ranges) > MAX_RANGES:
        raise ValueError(f"token_ranges: got {len(ranges)}, needs at most {MAX_RANGES}")
    return Hint(tuple(_read_range(each, priority, ttl) for each in ranges), returns)


def _read_range(given: Any, priority: int | None, ttl: float | None) -> HintRange:
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
    """A number of a payload or of a range, checked."""
    value = given.get(name)
    if value is None:
        return default
    kind, least, most, needs = _NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, needs {needs}")
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value}, needs {needs}")
    return value


class PolicyScheduler(Scheduler):
    """vLLM's scheduler with a policy of `pc.cache` (`scheduler_cls`, with `async_scheduling=False`)."""

    block_pool: PolicyBlockPool
    kv_cache_manager: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector in PEEKING:
            raise ValueError(f"kv_connector: got {transfer.kv_connector}, which needs vLLM's own order of eviction")
        super().__init__(vllm_config, *args, **kwargs)
        self.block_pool = install_policy(self.kv_cache_manager.block_pool, chosen_policy(vllm_config))
        # Rows of hidden states are void where a KV connector, unseen by the workers, fills blocks anew.
        self._sends_fresh = transfer is not None
        self.block_pool.handed_out = [] if self._sends_fresh else None
        self._hints: dict[str, Hint] = {}
        self._hinted: dict[str, list[int]] = {}
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        announce(vllm_config)

    def add_request(self, request: Any) -> None:
        """Takes a request's hint, unless it cannot be read: that is logged, and the request goes on without."""
        try:
            hint = read_hint(request)
        except (TypeError, ValueError) as error:
            logger.warning("kv_hints of request %s are not honoured: %s", request.request_id, error)
            hint = None
        if hint is not None:
            self._hints[request.request_id] = hint
            self.kv_cache_manager.allocate_slots = self._allocate_hinted  # dearer, so from the first hint on
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step; with a KV connector, which may fill blocks, the workers are sent those handed out anew."""
        output = super().schedule(*args, **kwargs)
        if self._sends_fresh:
            output.pc_fresh_blocks, self.block_pool.handed_out = self.block_pool.handed_out, []
        return output

    def _allocate_hinted(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = self._allocate_slots(request, *args, **kwargs)
        hint = self._hints.get(request.request_id)
        if hint is not None and hint.ranges and blocks is not None:
            self._hand_on(request.request_id, hint)
        return blocks

    def _hand_on(self, request_id: str, hint: Hint) -> None:
        """Hints the blocks that a request has got since last time."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        done = self._hinted.setdefault(request_id, [0] * len(managers))
        for group, manager in enumerate(managers):
            blocks, size = manager.req_to_blocks[request_id], manager.block_size
            begin, done[group] = min(done[group], len(blocks)), len(blocks)
            for each in hint.ranges:
                end = len(blocks) if each.end is None else min(len(blocks), -(-each.end // size))
                ids = [b.block_id for b in blocks[max(begin, each.start // size) : end] if not b.is_null]
                if ids:
                    self.block_pool.policy_state.hinted(ids, each.priority, each.ttl)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._hinted.pop(request.request_id, None)
        return super()._preempt_request(request, *args, **kwargs)

    def _free_blocks(self, request: Any) -> None:
        hint = self._hints.pop(request.request_id, None)
        self._hinted.pop(request.request_id, None)
        self.block_pool.policy_state.finished(request.num_output_tokens, None if hint is None else hint.returns)
        super()._free_blocks(request)


class AsyncPolicyScheduler(PolicyScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with a policy of `pc.cache` (`scheduler_cls`)."""
