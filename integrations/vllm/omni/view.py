"""Slots of a step out of vLLM's input batch, for the group of layers that hidden states follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm_omni.core.prefix_cache.interface import OmniPrefixCacheUnmatchError

from ....cache.runs import Run, slot_runs
from ....cache.tensors.step_slots import StepSlots
from ..groups import full_attention_group


class GroupView:
    """In place of vLLM-Omni's `FullAttentionGroupView`: any group, and blocks that kernels split.

    Args:
        input_batch: VLLM's.
        group: Number of a group with full attention.
        block_size: Tokens of its blocks.

    Raises:
        OmniPrefixCacheUnmatchError: Decode context parallelism, which deals tokens out to ranks.
    """

    def __init__(self, input_batch: Any, group: int, block_size: int) -> None:
        self._batch = input_batch
        self.group = group
        self.block_size = block_size
        table = input_batch.block_table[group]
        if int(getattr(table, "dcp_world_size", 1)) != 1:
            raise OmniPrefixCacheUnmatchError("decode context parallelism: not supported with omni prefix caching")
        # A row of the table then holds the parts of blocks that kernels see; their slots are those of the blocks.
        self._table_block_size = block_size // int(getattr(table, "blocks_per_kv_block", 1))

    def batch_req_ids(self) -> list[str]:
        """Requests of the batch, in its order."""
        return list(self._batch.req_ids)

    def slots(self, requests: Iterable[str], counts: Mapping[str, int]) -> StepSlots:
        """Slots of the next `counts` tokens of each request, behind each other."""
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

    def step_slots_cpu(self, req_ids: list[str], num_scheduled: Mapping[str, int]) -> torch.Tensor:
        """The slots themselves, as vLLM-Omni asks for them."""
        return self.slots(req_ids, num_scheduled).index


def check_groups(kv_cache_groups: Iterable[Any]) -> None:
    """In place of vLLM-Omni's check, which refuses more than one group.

    Raises:
        OmniPrefixCacheUnmatchError: No group has full attention.
    """
    _group(kv_cache_groups)


def make_view(input_batch: Any, block_size: int, kv_cache_groups: Any = None) -> GroupView | None:
    """In place of vLLM-Omni's `get_prefix_cache_group_view`; the block size is that of the group.

    Raises:
        OmniPrefixCacheUnmatchError: As `check_groups` and `GroupView`.
    """
    groups = list(kv_cache_groups or ())
    number = _group(groups)
    if not getattr(input_batch.block_table, "block_tables", None):
        return None
    return GroupView(input_batch, number, groups[number].kv_cache_spec.block_size)


def _group(groups: Iterable[Any]) -> int:
    try:
        return full_attention_group(list(groups or ()))
    except ValueError as error:
        raise OmniPrefixCacheUnmatchError(str(error)) from error
