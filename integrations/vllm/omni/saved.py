"""A step whose outputs nobody has taken yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from vllm_omni.core.prefix_cache.interface import OmniPrefixCacheUnmatchError, is_hidden_key

from ....cache.table import Ids
from ....cache.tensors.step import Step
from ....cache.tensors.step_slots import StepSlots
from ....cache.tensors.tensor_cache import TensorCache
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

    def read(self, cache: TensorCache, request: str, more: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """All rows of the request, up to so many tokens behind the hit.

        Raises:
            OmniPrefixCacheUnmatchError: Too few blocks, or rows of hidden states that are missing.
        """
        if len(self.blocks) * cache.block_size < self.end + more:
            got = f"{len(self.blocks)} for {self.end + more} tokens of {request}"
            raise OmniPrefixCacheUnmatchError(f"block_ids: got {got}")
        for name in names:
            if is_hidden_key(name):
                there = cache.available(self.blocks, [name], self.end)
                if there < self.end:
                    raise OmniPrefixCacheUnmatchError(
                        f"hit span for req {request} key={name} is not readable (rows from {there} on are absent)"
                    )
        return cache.load(self.blocks, names, self.end + more, missing="zero")


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

    def read(self, cache: TensorCache, requests: Sequence[str]) -> Rows:
        """The rows of some of its requests, behind those of their hits.

        Raises:
            OmniPrefixCacheUnmatchError: Rows of hidden states that are missing.
        """
        names, new = self.names, self.new
        if new is None:
            plain = names and any(request not in self.hits for request in requests)
            new = cache.read(Step.at(self.slots, {}), names) if plain else {}
        rows: Rows = {name: {} for name in names}
        for request in requests:
            begin, end = self.spans[request]
            hit = self.hits.get(request)
            if hit is None:
                for name, tensor in new.items():
                    rows[name][request] = tensor if end - begin == self.slots.count else tensor[begin:end]
            else:
                for name, tensor in hit.read(cache, request, end - begin, names).items():
                    rows[name][request] = tensor[hit.begin :]
        return rows


def copied_rows(kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The rows of a step by name, if they are few and in host memory."""
    copies = {}
    for name, value in kept.items():
        if not value.is_cpu or value.nbytes > FEW_BYTES:
            return None
        copies[name] = (value.detach() if value.requires_grad else value).clone()
    return copies
