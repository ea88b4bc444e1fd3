"""Gathers whole blocks of a cache: out[i] = cache[block_ids[i]], zeros where the id is -1.

Reads and writes the bytes of n blocks once; nothing is computed, so every dtype is served and no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._copy.ops import BLOCKS, empty_rows, gather_cpu, move_rows
from ._library import operator


def _cpu(args: Any) -> torch.Tensor:
    return gather_cpu("gather_blocks", BLOCKS, [args.cache], args.block_ids, args.device)[0]


def _launch(args: Any) -> torch.Tensor:
    return move_rows("gather_blocks", BLOCKS, [args.cache], args.block_ids, None, args.device)[0]


def _cpu_list(args: Any) -> list[torch.Tensor]:
    return [*gather_cpu("gather_blocks_list", BLOCKS, args.caches, args.block_ids, args.device)]


def _launch_list(args: Any) -> list[torch.Tensor]:
    return [*move_rows("gather_blocks_list", BLOCKS, args.caches, args.block_ids, None, args.device)]


@operator(cpu=_cpu, launch=_launch)
def gather_blocks(
    cache: torch.Tensor, block_ids: torch.Tensor, device: torch.device | str | None = None
) -> torch.Tensor:
    """Gathers blocks of a cache into a packed tensor.

    Long contiguous runs of an index in host memory go through the copy engine where the cache or the result is on a
    device.

    Args:
        cache: `[num_blocks, block_size, *features]`, any dtype and strides; on a device, or in host memory, which has
            to be pinned when the index is on a device.
        block_ids: `[n]` int32 or int64; -1 gives zeros.
        device: Where the result goes; None: where the index is if that is a device, else where the cache is. A result
            in host memory gathered from a device is pinned, and there once the current stream is synchronized.

    Returns:
        `[n, block_size, *features]`, contiguous, cache's dtype.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device; with the index in host memory, and in debug mode, also one out of range.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> cache = torch.arange(4.0).view(4, 1, 1).expand(4, 2, 3).contiguous()  # 4 blocks of 2 slots
        >>> out = pc.gather_blocks(cache, torch.tensor([3, -1, 1]))
        >>> out.shape, out[:, 0, 0]
        (torch.Size([3, 2, 3]), tensor([3., 0., 1.]))
    """
    return empty_rows(cache, BLOCKS, block_ids, device)


@operator(cpu=_cpu_list, launch=_launch_list, docs_from=(gather_blocks,))
def gather_blocks_list(
    caches: Sequence[torch.Tensor], block_ids: torch.Tensor, device: torch.device | str | None = None
) -> list[torch.Tensor]:
    """Gathers the same blocks of several caches, in one launch per eight of them.

    Args:
        caches: Each as the operator for one takes it; one device, the same num_blocks and block_size, features and
            dtypes of their own.

    Returns:
        One tensor per cache.

    Examples:
        >>> keys, values = torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 128)
        >>> k, v = pc.gather_blocks_list([keys, values], torch.tensor([3, 1]))
        >>> k.shape, v.shape
        (torch.Size([2, 16, 2, 64]), torch.Size([2, 16, 2, 128]))
    """
    return [empty_rows(cache, BLOCKS, block_ids, device) for cache in caches]
