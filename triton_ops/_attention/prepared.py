"""What was decided for a kind of call: its launches, and what is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._launcher import KernelLaunch
from .call import PlanOptions
from .layout import PlanShape


@dataclass(frozen=True, slots=True)
class Grid:
    """One launch: a kernel's constants and its programs.

    Attributes:
        launch: The constants.
        programs: The grid.
        numbers: The kernel's arguments between tensors and constants.
        split_rows: Rows of partial results; 0 for none.
        split_heads: Heads of each of them.
    """

    launch: KernelLaunch
    programs: tuple[int, int, int]
    numbers: tuple[float, ...]
    split_rows: int = 0
    split_heads: int = 0


@dataclass(frozen=True, slots=True)
class Results:
    """What a call gives: the first result's shape and dtype, and whether both and its strides are the query's."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    like_query: bool
    with_lse: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a call launches.

    Attributes:
        shape: The plan's.
        options: The plan's.
        target_items: About how many work items a plan made for this call has.
        convert_codes: Whether kernels convert float8 by bit operations.
        descriptors: Whether a kernel reads through tensor descriptors.
        decode: Sequences of few queries, from the work list; None where there can be none, as for the others.
        prefill: The longer ones, tiled over queries.
        specialized: Some of the latter's tiles with specialized warps.
        merge: The sum of splits.
        results: What is allocated for the caller.
        no_lse: Stands for the second result where it is not wanted.
    """

    shape: PlanShape
    options: PlanOptions
    target_items: int
    convert_codes: bool
    descriptors: bool
    decode: Grid | None
    prefill: Grid | None
    specialized: Grid | None
    merge: Grid
    results: Results
    no_lse: torch.Tensor
