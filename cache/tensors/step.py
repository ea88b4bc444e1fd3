"""What one forward pass computed: its outputs, and which tokens of which requests they belong to."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..allocation import BaseAllocation, Span
from ..runs import Slots
from .step_slots import StepSlots


class StepRequest(NamedTuple):
    """A request in a step: its rows [begin, end) there, how many tokens it has, and whether gaps lie between them."""

    request: Hashable
    begin: int
    end: int
    num_tokens: int
    scattered: bool


@dataclass(frozen=True)
class Step:
    """The outputs of a forward pass over the tokens of a batch.

    Attributes:
        outputs: By name, nested mappings and sequences included: tensors `[num_tokens, *features]`, and anything else.
        slot_mapping: `[num_tokens]` int64 on the host: the slot of each token, -1 for one that is not stored. The same
            that the KV of these tokens was written to.
        requests: Ids of the requests in the order of the batch; needed for `TensorCache.join` alone.
        query_start_loc: `[num_requests + 1]`, where the tokens of each request begin.
        positions: `[num_tokens]`, position of each token in its request, ascending within it.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> allocations = {"a": manager.allocate("a", range(3)), "b": manager.allocate("b", range(6))}
        >>> step = pc.Step.of(allocations, {"hidden": torch.randn(9, 32)})  # what the model gave for them
        >>> step.query_start_loc.tolist(), step.positions.tolist()
        ([0, 3, 9], [0, 1, 2, 0, 1, 2, 3, 4, 5])
    """

    outputs: Mapping[str, object]
    slot_mapping: Slots
    requests: tuple[Hashable, ...] = ()
    query_start_loc: npt.NDArray[np.int32] | None = None
    positions: npt.NDArray[np.int32] | None = None

    @classmethod
    def of(cls, allocations: Mapping[Hashable, BaseAllocation], outputs: Mapping[str, object], group: int = 0) -> Step:
        """The step that computes all `compute_spans` of some allocations, request after request.

        Args:
            allocations: By request id, in the order of the batch.
            outputs: As in `outputs`.
            group: Whose slots to take, when the manager has several groups.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
            >>> allocation = manager.allocate("a", range(3))
            >>> pc.Step.of({"a": allocation}, {"hidden": torch.randn(3, 32)}).slot_mapping.tolist()
            [0, 1, 2]
        """
        parts, runs, spans, count = [], [], [], 0
        for request, allocation in allocations.items():
            begin, mine = count, allocation.compute_spans
            count += sum([end - start for start, end in mine])
            spans += mine
            last = mine[-1][1] if count > begin else 0
            parts.append(StepRequest(request, begin, count, last, count > begin and last - mine[0][0] != count - begin))
            found = allocation.slot_runs(group)
            runs += [(begin + token, first, behind) for token, first, behind in found] if begin else found
        step = object.__new__(_StepOf)
        step.__dict__.update(
            outputs=outputs, requests=tuple(allocations), parts=parts, slots=StepSlots(count, runs), _spans=spans
        )
        return step

    @classmethod
    def at(cls, slots: StepSlots, outputs: Mapping[str, object]) -> Step:
        """A step whose slots have been looked through already.

        Args:
            slots: Of its tokens.
            outputs: As in `outputs`.
        """
        step = object.__new__(_StepAt)
        step.__dict__.update(outputs=outputs, slots=slots, requests=(), query_start_loc=None, positions=None)
        return step

    @cached_property
    def slots(self) -> StepSlots:
        """`slot_mapping` looked through, once for all tensors."""
        return StepSlots.of(self.slot_mapping)

    @cached_property
    def is_decode(self) -> bool:
        """Whether it may have as many requests as tokens, so that a row a token and a row a request look alike."""
        if self.requests:
            return self.slots.count <= len(self.requests)
        return self.slots.all_single

    @cached_property
    def parts(self) -> list[StepRequest] | None:
        """The requests, for `TensorCache.join`; None without positions."""
        if self.query_start_loc is None or self.positions is None:
            return None
        bounds, parts = self.query_start_loc.tolist(), []
        for request, begin, end in zip(self.requests, bounds[:-1], bounds[1:], strict=True):
            first, last = (int(self.positions[begin]), int(self.positions[end - 1])) if begin < end else (0, -1)
            parts.append(StepRequest(request, begin, end, last + 1, last - first != end - begin - 1))
        return parts


class _StepAt(Step):
    """A step of slots, whose array is made when it is read: storing mostly goes without."""

    @cached_property
    def slot_mapping(self) -> Slots:
        return self.slots.array


class _StepOf(_StepAt):
    """A step of allocations, whose arrays are made when they are read: storing and joining mostly go without."""

    @cached_property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        return np.array([0, *(part.end for part in self.parts or ())], np.int32)

    @cached_property
    def positions(self) -> npt.NDArray[np.int32]:
        spans: list[Span] = self.__dict__["_spans"]
        return np.concatenate([np.empty(0, np.int32), *(np.arange(start, end, dtype=np.int32) for start, end in spans)])


def leaves(outputs: object) -> list[tuple[str, object]]:
    """Every leaf of nested mappings, lists and tuples, named by its path with dots: `{"a": {"b": x}}` gives "a.b"."""
    found: list[tuple[str, object]] = []
    _collect(outputs, "", found)
    return found


def _collect(outputs: object, prefix: str, found: list[tuple[str, object]]) -> None:
    if isinstance(outputs, Mapping):
        items = outputs.items()
    elif isinstance(outputs, list | tuple) and not isinstance(outputs, torch.Size):
        items = enumerate(outputs)  # type: ignore[assignment]
    else:
        found.append((prefix, outputs))
        return
    for key, value in items:
        _collect(value, f"{prefix}.{key}" if prefix else str(key), found)
