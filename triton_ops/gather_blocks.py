"""The operator that gathers whole blocks of a cache: out[i] = cache[block_ids[i]], or zeros if the id is -1.

It reads and writes the bytes of n blocks once. It computes nothing, so it takes every dtype and changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._copy.ops import BLOCKS, empty_rows, move_rows
from ._core.operator import operator


@operator(run=move_rows)
def gather_blocks(
    cache: torch.Tensor, block_ids: torch.Tensor, device: torch.device | str | None = None
) -> torch.Tensor:
    """Gather blocks of a cache into a packed tensor.

    If the index is in host memory, and either the cache or the result is on a device, the copy engine moves long
    contiguous runs.

    Args:
        cache: `[num_blocks, block_size, *features]`, any dtype and strides, on a device or in host memory. If the index
            is on a device, host memory must be pinned.
        block_ids: `[n]` int32 or int64. -1 gives zeros.
        device: The device of the result. None: the index's if that is an accelerator, otherwise the cache's. A result
            in host memory from a cache on a device is pinned, and complete once the current stream is synchronized.

    Returns:
        `[n, block_size, *features]`, contiguous, with the cache's dtype.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is invalid. For an index in host memory, and in debug mode, also: an index is out
            of range.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> cache = torch.arange(4.0).view(4, 1, 1).expand(4, 2, 3).contiguous()  # 4 blocks of 2 slots
        >>> out = pc.gather_blocks(cache, torch.tensor([3, -1, 1]))
        >>> out.shape, out[:, 0, 0]
        (torch.Size([3, 2, 3]), tensor([3., 0., 1.]))
    """
    return empty_rows(cache, BLOCKS, block_ids, device)


@operator(run=move_rows, docs_from=(gather_blocks,))
def gather_blocks_list(
    caches: Sequence[torch.Tensor], block_ids: torch.Tensor, device: torch.device | str | None = None
) -> list[torch.Tensor]:
    """Gather the same blocks of several caches, with one launch for every eight caches.

    Args:
        caches: Caches as for the operator with a single cache, on one device, with the same num_blocks and block_size.
            Features and dtypes may differ.

    Returns:
        One tensor for each cache.

    Examples:
        >>> keys, values = torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 128)
        >>> k, v = pc.gather_blocks_list([keys, values], torch.tensor([3, 1]))
        >>> k.shape, v.shape
        (torch.Size([2, 16, 2, 64]), torch.Size([2, 16, 2, 128]))
    """
    return [empty_rows(cache, BLOCKS, block_ids, device) for cache in caches]
