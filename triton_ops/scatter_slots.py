"""Scatters token rows into a cache: cache[slot // block_size, slot % block_size] = source[i], nothing at slot -1.

Reads and writes the bytes of num_tokens rows once; nothing is computed, so every dtype is served and no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._library import operator
from ._rows.ops import SLOTS, Scatter

_rows = Scatter("scatter_slots", SLOTS)


@operator(cpu=_rows.cpu, launch=_rows.launch, mutates=("cache",), direct=True)
def scatter_slots(source: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes the rows of tokens to their slots of a cache.

    A slot that appears twice, and memory that source and cache share, are undefined.

    Args:
        source: `[num_tokens, *features]`, cache's dtype, any strides; on a device, or in host memory.
        cache: `[num_blocks, block_size, *features]`, any dtype and strides, written to; on a device, or in host memory.
        slot_mapping: `[num_tokens]` int64 or int32, block number * block_size + offset; -1 writes nothing. On a device
            it needs host memory to be pinned. In host memory with one of the two tensors on a device, long contiguous
            runs go through the copy engine.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device; with slots in host memory, and in debug mode, also a slot out of range.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> cache = torch.zeros(4, 2, 1)  # 4 blocks of 2 slots
        >>> pc.scatter_slots(torch.tensor([[1.0], [2.0], [3.0]]), cache, torch.tensor([6, -1, 1]))
        >>> cache[:, :, 0]
        tensor([[0., 3.],
                [0., 0.],
                [0., 0.],
                [1., 0.]])
    """


@operator(cpu=_rows.cpu_list, launch=_rows.launch_list, mutates=("caches",))
def scatter_slots_list(
    sources: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], slot_mapping: torch.Tensor
) -> None:
    """Writes to the same slots of several caches, in one launch per eight of them.

    Args:
        sources: One per cache, like `source` of `pc.scatter_slots`; one device.
        caches: Like `cache` of `pc.scatter_slots`; one device and the same num_blocks and block_size, features and
            dtypes of their own.
        slot_mapping: As in `pc.scatter_slots`.

    Raises:
        TypeError: As in `pc.scatter_slots`.
        ValueError: As in `pc.scatter_slots`, and for tensors that do not agree.
        RuntimeError: As in `pc.scatter_slots`.

    Examples:
        >>> hidden, gates = torch.zeros(4, 2, 8), torch.zeros(4, 2, 3)
        >>> rows = [torch.randn(2, 8), torch.randn(2, 3)]
        >>> pc.scatter_slots_list(rows, [hidden, gates], torch.tensor([6, 1]))
        >>> torch.equal(hidden[3, 0], rows[0][0]) and torch.equal(gates[0, 1], rows[1][1])
        True
    """
