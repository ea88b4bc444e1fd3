"""A step whose outputs nobody has taken yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from vllm_omni.core.prefix_cache.interface import OmniPrefixCacheUnmatchError

from ....cache.table import Ids
from ....cache.tensors.step_slots import StepSlots
from .leftover import Leftover

FEW_BYTES = 1 << 16
"""Of a name: so few rows of a step are copied when they are saved, since finding them again takes longer."""

Rows = dict[str, dict[str, torch.Tensor]]
"""By name and request."""


class Hit(NamedTuple):
    """Cached tokens of a request that enters a batch: from which on they are handed on, how many, and its blocks."""

    begin: int
    end: int
    blocks: Ids


@dataclass(slots=True)
class SavedStep:
    """Where its rows are, and what is handed on with them."""

    slots: StepSlots
    names: tuple[str, ...]
    spans: dict[str, tuple[int, int]]
    hits: dict[str, Hit]
    leftover: Leftover
    new: dict[str, torch.Tensor] | None
    """Its own rows, where they are few."""
    rows: Rows | OmniPrefixCacheUnmatchError | None = None
    """Read as soon as a later step writes; what was wrong then is said to who takes them."""


def copied_rows(kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The rows of a step by name, if they are few and in host memory."""
    copies = {}
    for name, value in kept.items():
        if not value.is_cpu or value.nbytes > FEW_BYTES:
            return None
        copies[name] = (value.detach() if value.requires_grad else value).clone()
    return copies
