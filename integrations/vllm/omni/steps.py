"""A step of vLLM-Omni's runner: the slots of its tokens, and its outputs until the runner reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....cache.runs import Run, slot_runs
from ....cache.tensors.step import Step, StepSlots
from ....cache.tensors.tensor_cache import TensorCache
from .. import api
from ..scheduler_output import ScheduledRequest, full_attention_group

FEW_BYTES = 1 << 16
"""Up to this size, an output's rows are copied when a step is saved, which is faster than a later read."""

Rows = dict[str, dict[str, torch.Tensor]]
"""Rows by the name of the output, and then by request."""


@dataclass(slots=True)
class SavedStep:
    """A step that waits to be read: the slots of its rows, and its other outputs."""

    slots: StepSlots
    names: tuple[str, ...]
    spans: dict[str, tuple[int, int]]
    hits: dict[str, tuple[int, ScheduledRequest]]
    """The requests that enter with cached tokens, and the position from which on they get rows."""
    others: dict[str, Any]
    ready: torch.cuda.Event | None
    """Has happened when `others` are complete; see `copied_outputs`."""
    new: dict[str, torch.Tensor] | None
    """A copy of the step's own rows, if they are few; see `copied_rows`."""
    rows: Rows | Exception | None = None
    """The rows, if they were read before a later step overwrote them, or the error of that read."""

    def read(self, cache: TensorCache, requests: Sequence[str]) -> Rows:
        """Return the rows of some requests, each preceded by the rows of its hit. Raise like `read_hit`."""
        names, new = self.names, self.new
        if new is None:
            without_hit = names and any(request not in self.hits for request in requests)
            new = cache.read(Step({}, self.slots.array), names) if without_hit else {}
        rows: Rows = {name: {} for name in names}
        for request in requests:
            begin, end = self.spans[request]
            hit = self.hits.get(request)
            if hit is None:
                for name, tensor in new.items():
                    rows[name][request] = tensor if end - begin == self.slots.count else tensor[begin:end]
            else:
                first, entered = hit
                for name, tensor in read_hit(cache, entered, end - begin, names).items():
                    rows[name][request] = tensor[first:]
        return rows

    def split(self, requests: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return each request's part of the other outputs, by name, as vLLM-Omni itself divides them.

        If a tensor has a row for each token, the part is the rows of the request's tokens.
        """
        if self.ready is not None:
            self.ready.synchronize()
        order, total = list(self.spans), sum(end - begin for begin, end in self.spans.values())
        return {
            name: {
                request: api.to_payload_element(
                    value,
                    order.index(request),
                    start=self.spans[request][0],
                    end=self.spans[request][1],
                    pass_lists_through=True,
                    seq_len=total,
                )
                for request in requests
            }
            for name, value in self.others.items()
        }


def read_hit(cache: TensorCache, request: ScheduledRequest, more: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return all rows of a request by name: those of its cached tokens, and `more` after them.

    Raises:
        OmniPrefixCacheUnmatchError: Blocks, or rows of hidden states, are missing.
    """
    cached, blocks = request.begin, np.array(request.blocks, np.int32)
    if len(blocks) * cache.block_size < cached + more:
        got = f"{len(blocks)} for {cached + more} tokens of {request.request_id}"
        raise api.OmniPrefixCacheUnmatchError(f"block_ids: got {got}")
    for name in filter(api.is_hidden_key, names):
        there = cache.available(blocks, [name], cached)
        if there < cached:
            got = f"hit span for req {request.request_id} key={name} is not readable (rows from {there} on are absent)"
            raise api.OmniPrefixCacheUnmatchError(got)
    return cache.load(blocks, names, cached + more, missing="zero")


def copied_rows(kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return copies of a step's rows by name, if they are few and in host memory; else None."""
    copies = {}
    for name, value in kept.items():
        if not value.is_cpu or value.nbytes > FEW_BYTES:
            return None
        copies[name] = (value.detach() if value.requires_grad else value).clone()
    return copies


def copied_outputs(outputs: Mapping[str, Any]) -> tuple[dict[str, Any], torch.cuda.Event | None]:
    """Copy outputs by name into host memory, because the next step may overwrite them.

    Returns:
        The copies, and an event if some come from a device: copies are complete when the event has happened.
    """
    devices: list[torch.device] = []
    copies = {name: _copied(value, devices) for name, value in outputs.items()}
    if not devices:
        return copies, None
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(devices[0]))
    return copies, ready


def _copied(value: Any, devices: list[torch.device]) -> Any:
    """Return a copy of a value with all tensors nested in it. Add the devices from which copies run to `devices`."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if not value.is_cuda:
            return value.to("cpu", copy=True, memory_format=torch.contiguous_format)
        devices.append(value.device)
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return host.copy_(value, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _copied(each, devices) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each, devices) for each in value]
    return tuple(_copied(each, devices) for each in value) if isinstance(value, tuple) else value


class GroupView:
    """The requests and slots of a batch, read from the block table of any full attention group.

    It takes the place of vLLM-Omni's `FullAttentionGroupView`, and kernels may split the group's blocks.
    """

    def __init__(self, input_batch: Any, group: int, block_size: int) -> None:
        self._batch = input_batch
        self.group = group
        self.block_size = block_size
        table = input_batch.block_table[group]
        if int(getattr(table, "dcp_world_size", 1)) != 1:
            raise api.OmniPrefixCacheUnmatchError("decode context parallelism: not supported with omni prefix caching")
        # Kernels may split a block into smaller ones, which the table then lists. Slots have the same numbers in both.
        self._table_block_size = block_size // int(getattr(table, "blocks_per_kv_block", 1))

    def batch_req_ids(self) -> list[str]:
        """Return the requests of the batch, in order."""
        return list(self._batch.req_ids)

    def slots(self, requests: Iterable[str], counts: Mapping[str, int]) -> StepSlots:
        """Return the slots of the next `counts` tokens of each request, one request after another."""
        batch, size = self._batch, self._table_block_size
        table, computed, rows = batch.block_table[self.group].block_table, batch.num_computed_tokens_cpu, None
        runs: list[Run] = []
        begin = 0
        for request in requests:
            count = counts.get(request, 0)
            if not count:
                continue
            rows = table.np if rows is None else rows
            row = batch.req_id_to_index[request]
            block, offset = divmod(computed.item(row), size)
            if offset + count <= size:
                first = rows.item(row, block) * size + offset
                runs.append((begin, first, first + count))
            else:
                blocks = rows[row, block : block - (-(offset + count) // size)].tolist()
                runs += [(begin + token, first, end) for token, first, end in slot_runs(blocks, size, offset, count)]
            begin += count
        return StepSlots(begin, runs)


def check_groups(kv_cache_groups: Iterable[Any]) -> int:
    """Return the first group with full attention, in place of vLLM-Omni's check, which allows only one group.

    Raises:
        OmniPrefixCacheUnmatchError: No group has full attention.
    """
    try:
        return full_attention_group(list(kv_cache_groups or ()))
    except ValueError as error:
        raise api.OmniPrefixCacheUnmatchError(str(error)) from error


def make_view(input_batch: Any, block_size: int, kv_cache_groups: Any = None) -> GroupView | None:
    """Return the view of a batch, in place of vLLM-Omni's function; None if the batch has no block tables.

    `block_size` is ignored, because the group has its own block size.
    """
    groups = list(kv_cache_groups or ())
    number = check_groups(groups)
    if not getattr(input_batch.block_table, "block_tables", None):
        return None
    return GroupView(input_batch, number, groups[number].kv_cache_spec.block_size)
