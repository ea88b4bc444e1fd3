"""The operator that scatters whole blocks into a cache: cache[block_ids[i]] = source[i]; id -1 writes nothing.

It reads and writes the bytes of n blocks once. It computes nothing, so it takes every dtype and changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._copy.ops import move_rows
from ._core.operator import operator
from .gather_blocks import gather_blocks_list


@operator(run=move_rows, mutates=("cache",))
def scatter_blocks(source: torch.Tensor, cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Write packed blocks to their places in a cache.

    The result is undefined if a place appears twice, or if source and cache share memory. If the index is in host
    memory, and either tensor is on a device, the copy engine moves long contiguous runs.

    Args:
        source: `[n, block_size, *features]`, with the cache's dtype and any strides, on a device or in host memory.
            A kernel may read pinned memory after this call, so keep it until the current stream has passed the call.
        cache: `[num_blocks, block_size, *features]`, any dtype and strides, on a device or in host memory. It is
            written to. If the index is on a device, host memory must be pinned.
        block_ids: `[n]` int32 or int64. -1 writes nothing.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is invalid. For an index in host memory, and in debug mode, also: an index is out
            of range.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> cache = torch.zeros(4, 2, 1)  # 4 blocks of 2 slots
        >>> pc.scatter_blocks(torch.arange(1.0, 5.0).view(2, 2, 1), cache, torch.tensor([3, 0]))
        >>> cache[:, :, 0]
        tensor([[3., 4.],
                [0., 0.],
                [0., 0.],
                [1., 2.]])
    """


@operator(run=move_rows, mutates=("caches",), docs_from=(scatter_blocks, gather_blocks_list))
def scatter_blocks_list(
    sources: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], block_ids: torch.Tensor
) -> None:
    """Write to the same blocks of several caches, with one launch for every eight caches.

    Args:
        sources: A source for each cache, as for the operator with a single cache. All are on one device.

    Examples:
        >>> keys, values = torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 128)
        >>> sources = [torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 128)]
        >>> pc.scatter_blocks_list(sources, [keys, values], torch.tensor([3, 0]))
        >>> torch.equal(keys[3], sources[0][0]) and torch.equal(values[0], sources[1][1])
        True
    """
