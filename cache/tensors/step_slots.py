"""The slots of a step, looked through once for all of its tensors."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ..allocation import Span
from ..runs import Run, Slots, ascending, find_runs

_FEW_RUNS, _SHORT = 8, 8  # above so many runs, shorter ones are moved slot by slot


class StepSlots:
    """Slots of tokens, as runs where these are long.

    Args:
        count: How many tokens.
        runs: Of all slots that are not negative.
        array: The slots themselves; None: made when they are needed.

    Attributes:
        count: How many tokens.
        runs: As given; None where they are short.
        spans: The same slots in ascending order; none where runs are short.
        low: The lowest slot, 0 of none.
        high: The highest slot, -1 of none.
    """

    def __init__(self, count: int, runs: list[Run], array: Slots | None = None) -> None:
        self.count = count
        self._runs = runs
        self.runs: list[Run] | None = runs
        self.spans: list[Span]
        if array is not None:
            self.array = array
        if len(runs) == 1:  # as of a request that decodes, where the rest would take longest
            _, first, end = runs[0]
            self.spans, self.low, self.high = [(first, end)], first if end - first >= count else -1, end - 1
            return
        if len(runs) > max(_FEW_RUNS, count // _SHORT):
            self.runs = None
        self.spans = ascending(runs) if self.runs is not None else []
        if self.spans:
            self.low, self.high = self.spans[0][0], self.spans[-1][1] - 1
        else:
            self.low = min([first for _, first, _ in runs], default=0)
            self.high = max([end for _, _, end in runs], default=0) - 1
        if sum([end - first for _, first, end in runs]) < count:
            self.low = -1

    @classmethod
    def of(cls, slot_mapping: npt.ArrayLike) -> StepSlots:
        """Looks through an array of slots.

        Raises:
            TypeError: They are not integers.
            ValueError: They have more than one dimension.
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

    @property
    def all_single(self) -> bool:
        """Whether no two tokens have neighbouring slots."""
        return all(end - first == 1 for _, first, end in self._runs)

    @cached_property
    def array(self) -> Slots:
        """The slots, `[num_tokens]`, -1 for a token that is not stored."""
        slots = np.full(self.count, -1, np.int64)
        for begin, first, end in self._runs:
            slots[begin : begin + end - first] = np.arange(first, end)
        return slots

    @cached_property
    def kept(self) -> Slots:
        """Those that are not -1."""
        return self.array if self.low >= 0 else self.array[self.array >= 0]

    @cached_property
    def index(self) -> torch.Tensor:
        """The memory of `array` as a tensor."""
        return torch.from_numpy(self.array)
