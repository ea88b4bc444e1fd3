"""Scatters whole blocks into a cache: cache[block_ids[i]] = source[i], nothing where the id is -1.

Reads and writes the bytes of n blocks once; nothing is computed, so every dtype is served and no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._library import operator
from ._rows.ops import BLOCKS, Scatter

_rows = Scatter("scatter_blocks", BLOCKS)


@operator(cpu=_rows.cpu, launch=_rows.launch, mutates=("cache",), direct=True)
def scatter_blocks(source: torch.Tensor, cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Writes packed blocks to their places in a cache.

    A block number that appears twice, and memory that source and cache share, are undefined.

    Args:
        source: `[n, block_size, *features]`, cache's dtype, any strides; on a device, or in host memory.
        cache: `[num_blocks, block_size, *features]`, any dtype and strides, written to; on a device, or in host memory.
        block_ids: `[n]` int32 or int64; -1 writes nothing. On a device it needs host memory to be pinned. In host
            memory with one of the two tensors on a device, long contiguous runs go through the copy engine.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device; with ids in host memory, and in debug mode, also a block out of range.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> cache = torch.zeros(4, 2, 1)  # 4 blocks of 2 slots
        >>> pc.scatter_blocks(torch.arange(1.0, 5.0).view(2, 2, 1), cache, torch.tensor([3, 0]))
        >>> cache[:, :, 0]
        tensor([[3., 4.],
                [0., 0.],
                [0., 0.],
                [1., 2.]])
    """


@operator(cpu=_rows.cpu_list, launch=_rows.launch_list, mutates=("caches",))
def scatter_blocks_list(
    sources: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], block_ids: torch.Tensor
) -> None:
    """Writes to the same blocks of several caches, in one launch per eight of them.

    Args:
        sources: One per cache, like `source` of `pc.scatter_blocks`; one device.
        caches: Like `cache` of `pc.scatter_blocks`; one device and the same num_blocks and block_size, features and
            dtypes of their own.
        block_ids: As in `pc.scatter_blocks`.

    Raises:
        TypeError: As in `pc.scatter_blocks`.
        ValueError: As in `pc.scatter_blocks`, and for tensors that do not agree.
        RuntimeError: As in `pc.scatter_blocks`.

    Examples:
        >>> keys, values = torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 128)
        >>> sources = [torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 128)]
        >>> pc.scatter_blocks_list(sources, [keys, values], torch.tensor([3, 0]))
        >>> torch.equal(keys[3], sources[0][0]) and torch.equal(values[0], sources[1][1])
        True
    """
