"""The operator that copies blocks within a cache: cache[target_ids[i]] = cache[source_ids[i]].

It reads and writes the bytes of n blocks once. It computes nothing, so it takes every dtype and changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._copy import cpu
from ._copy.launch import launch_move_rows
from ._copy.ops import tensors_of
from ._core.checks import INDEX_DTYPES, check_caches, check_reachable, check_tensor, lowest_entry, on_host
from ._core.operator import operator
from .gather_blocks import gather_blocks, gather_blocks_list


def _run(args: Any) -> None:
    """Check the arguments and copy blocks within each cache."""
    (name, caches), source_ids, target_ids = tensors_of(args, "cache"), args.source_ids, args.target_ids
    check_caches(name, caches)
    check_tensor("source_ids", source_ids, "[n]", INDEX_DTYPES)
    check_tensor("target_ids", target_ids, "[n]", INDEX_DTYPES, source_ids.device, source_ids.shape)
    check_reachable(name, caches[0], source_ids, "source_ids")
    limit = caches[0].shape[0]
    lowest = lowest_entry("source_ids", source_ids, limit), lowest_entry("target_ids", target_ids, limit)
    if on_host(caches[0], source_ids):
        for cache in caches:
            cpu.copy_rows(cache, source_ids, target_ids, lowest)
        return
    if caches[0].is_cuda:
        source_ids = source_ids.to(caches[0].device, non_blocking=True)
        target_ids = target_ids.to(caches[0].device, non_blocking=True)
    op, indexes = type(args).__name__, (source_ids.contiguous(), target_ids.contiguous())
    launch_move_rows(op, caches, caches, (1, 1), source_ids.shape[0], *indexes)


@operator(run=_run, mutates=("cache",), docs_from=(gather_blocks,))
def copy_blocks(cache: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy blocks of a cache to other blocks of the same cache.

    The result is undefined if a target appears twice, or also as a source.

    Args:
        cache: `[num_blocks, block_size, *features]`, any dtype and strides. It is written to.
        source_ids: `[n]` int32 or int64. -1 writes zeros to the target.
        target_ids: `[n]` int32 or int64. -1 writes nothing.

    Examples:
        >>> cache = torch.arange(4.0).view(4, 1, 1).expand(4, 2, 3).contiguous()  # 4 blocks of 2 slots
        >>> pc.copy_blocks(cache, torch.tensor([3, 0]), torch.tensor([1, 2]))
        >>> cache[:, 0, 0]
        tensor([0., 3., 0., 3.])
    """


@operator(run=_run, mutates=("caches",), docs_from=(copy_blocks, gather_blocks_list))
def copy_blocks_list(caches: Sequence[torch.Tensor], source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
    """Copy the same blocks within each of several caches, with one launch for every eight caches.

    Examples:
        >>> keys, values = torch.randn(2, 4, 16, 2, 64).unbind()  # 4 blocks each
        >>> pc.copy_blocks_list([keys, values], torch.tensor([3]), torch.tensor([1]))
        >>> torch.equal(keys[1], keys[3]) and torch.equal(values[1], values[3])
        True
    """
