"""The outputs of one forward pass, with the requests, tokens and slots that they belong to."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ..allocation import AnyAllocation
from ..runs import Run, Slots, Span, find_runs, slots_of_runs

_FEW_RUNS, _SHORT = 8, 8  # with more runs than this, shorter runs are moved slot by slot


class StepSlots:
    """The slots of `count` tokens, as runs of the slots that are not negative.

    Attributes:
        all_runs: The runs.
        runs: The same; None if they are too many and short, so that rows are moved one by one.
        low: The lowest slot, which is negative if a token has none; 0 without tokens.
        high: The highest slot; -1 if no token has one.
    """

    def __init__(self, count: int, runs: list[Run], array: Slots | None = None) -> None:
        self.count = count
        self.all_runs = runs
        self.runs = runs if len(runs) <= max(_FEW_RUNS, count // _SHORT) else None
        if array is not None:
            self.array = array
        self.low = min([first for _, first, _ in runs], default=0)
        self.high = max([end for _, _, end in runs], default=0) - 1
        if sum([end - first for _, first, end in runs]) < count:
            self.low = -1

    @classmethod
    def of(cls, slot_mapping: npt.ArrayLike) -> StepSlots:
        """Return a slot mapping as `StepSlots`, after a check of its dtype and shape.

        Raises:
            TypeError: The slots are not integers.
            ValueError: Their shape is not `[num_tokens]`.
        """
        slots = np.asarray(slot_mapping)
        if slots.dtype != np.int64 or not slots.flags.carray:
            if slots.size and slots.dtype.kind not in "iu":
                raise TypeError(f"slot_mapping: got {slots.dtype}, needs integers")
            slots = np.require(slots, np.int64, ["C", "W"])
        if slots.ndim != 1:
            raise ValueError(f"slot_mapping: got shape {list(slots.shape)}, needs [num_tokens]")
        found = cls(len(slots), find_runs(slots), slots)
        if slots.size:
            found.low = int(slots.min())
        return found

    @cached_property
    def array(self) -> Slots:
        """The slots, `[num_tokens]`; -1 for a token that is not stored."""
        return slots_of_runs(self.all_runs, self.count)

    @cached_property
    def kept(self) -> Slots:
        """The slots that are not -1."""
        return self.array if self.low >= 0 else self.array[self.array >= 0]

    @cached_property
    def index(self) -> torch.Tensor:
        """`array` as a tensor for kernels; both share their memory."""
        return torch.from_numpy(self.array)


@dataclass(frozen=True)
class Step:
    """The outputs of a forward pass over the tokens of a batch.

    Attributes:
        outputs: Outputs by name, also in nested mappings and sequences: tensors `[num_tokens, *features]`, and others.
        slot_mapping: `[num_tokens]` int64 on the host: the slot to which each token's KV was written; -1 if not stored.
        requests: Ids of the requests in batch order. Only `TensorCache.join` needs them.
        query_start_loc: `[num_requests + 1]`, start of each request's tokens.
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
    def of(cls, allocations: Mapping[Hashable, AnyAllocation], outputs: Mapping[str, object], group: int = 0) -> Step:
        """Return the step that computes all `compute_spans` of some allocations, one request after another.

        Args:
            allocations: Allocations by request id, in batch order.
            outputs: As the attribute `outputs`.
            group: The group whose slots to use, if the manager has several.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
            >>> allocation = manager.allocate("a", range(3))
            >>> pc.Step.of({"a": allocation}, {"hidden": torch.randn(3, 32)}).slot_mapping.tolist()
            [0, 1, 2]
        """
        if not isinstance(allocations, Mapping):
            raise TypeError(f"allocations: got {type(allocations).__name__}, needs a mapping by request id")
        bounds = [0]
        lengths = []
        scattered = False
        runs: list[Run] = []
        all_spans: list[Span] = []
        for allocation in allocations.values():
            spans = allocation.compute_spans
            begin, end = bounds[-1], bounds[-1] + sum([end - start for start, end in spans])
            last = spans[-1][1] if end > begin else 0
            bounds.append(end)
            lengths.append(last)
            scattered |= end > begin and last - spans[0][0] != end - begin
            all_spans += spans
            found = allocation.slot_runs(group)
            runs += [(begin + token, first, behind) for token, first, behind in found] if begin else found
        step = object.__new__(_StepOf)
        extents, slots = (bounds, lengths, scattered), StepSlots(bounds[-1], runs)
        step.__dict__.update(
            outputs=outputs, requests=tuple(allocations), extents=extents, slots=slots, _spans=all_spans
        )
        return step

    @cached_property
    def slots(self) -> StepSlots:
        """The slots of `slot_mapping`, checked once for all tensors."""
        return StepSlots.of(self.slot_mapping)

    @cached_property
    def is_decode(self) -> bool:
        """Whether the step could be a decode, in which per-token and per-request tensors have the same shape.

        It could if it has no more tokens than requests. Without `requests`, it could if no token's slot directly
        follows the slot of the token before it.
        """
        if self.requests:
            return self.slots.count <= len(self.requests)
        return all(end - first == 1 for _, first, end in self.slots.all_runs)

    @cached_property
    def extents(self) -> tuple[list[int], list[int], bool] | None:
        """The extents of requests, for `TensorCache.join`; None without positions.

        They are `query_start_loc` as a list, each request's number of tokens up to its last position, and whether the
        positions of a request have gaps.
        """
        if self.query_start_loc is None or self.positions is None:
            return None
        bounds = self.query_start_loc.tolist()
        lengths = []
        scattered = False
        for _, begin, end in zip(self.requests, bounds[:-1], bounds[1:], strict=True):
            first, last = (int(self.positions[begin]), int(self.positions[end - 1])) if begin < end else (0, -1)
            lengths.append(last + 1)
            scattered |= last - first != end - begin - 1
        return bounds, lengths, scattered


class _StepOf(Step):
    """A step of allocations. Arrays are made on demand, because storing and joining usually do not need them."""

    @cached_property
    def slot_mapping(self) -> Slots:
        return self.slots.array

    @cached_property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        return np.array(self.__dict__["extents"][0], np.int32)

    @cached_property
    def positions(self) -> npt.NDArray[np.int32]:
        spans: list[Span] = self.__dict__["_spans"]
        return np.concatenate([np.empty(0, np.int32), *(np.arange(start, end, dtype=np.int32) for start, end in spans)])


def leaves(outputs: object, prefix: str = "") -> list[tuple[str, object]]:
    """Return every leaf of nested mappings, lists and tuples, named by its path: `{"a": {"b": x}}` gives "a.b"."""
    if isinstance(outputs, Mapping):
        items = outputs.items()
    elif isinstance(outputs, list | tuple) and not isinstance(outputs, torch.Size):
        items = enumerate(outputs)  # type: ignore[assignment]
    else:
        return [(prefix, outputs)]
    return [leaf for key, value in items for leaf in leaves(value, f"{prefix}.{key}" if prefix else str(key))]
