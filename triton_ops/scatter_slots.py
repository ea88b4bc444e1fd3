"""The operator that scatters token vectors into a cache: cache[slot // block_size, slot % block_size] = source[i].

Slot -1 writes nothing. The operator reads and writes the bytes of num_tokens vectors once. It computes nothing, so it
takes every dtype and changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._copy.ops import move_rows
from ._core.operator import operator
from .scatter_blocks import scatter_blocks, scatter_blocks_list


@operator(run=move_rows, mutates=("cache",), docs_from=(scatter_blocks,))
def scatter_slots(source: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write the vectors of tokens to their slots in a cache.

    The result is undefined if a slot appears twice, or if source and cache share memory. If `slot_mapping` is in
    host memory, and either tensor is on a device, the copy engine moves long contiguous runs.

    Args:
        source: `[num_tokens, *features]`, with the cache's dtype and any strides, on a device or in host memory.
            A kernel may read pinned memory after this call, so keep it until the current stream has passed the call.
        slot_mapping: `[num_tokens]` int64 or int32, block number * block_size + offset. -1 writes nothing.

    Examples:
        >>> cache = torch.zeros(4, 2, 1)  # 4 blocks of 2 slots
        >>> pc.scatter_slots(torch.tensor([[1.0], [2.0], [3.0]]), cache, torch.tensor([6, -1, 1]))
        >>> cache[:, :, 0]
        tensor([[0., 3.],
                [0., 0.],
                [0., 0.],
                [1., 0.]])
    """


@operator(run=move_rows, mutates=("caches",), docs_from=(scatter_slots, scatter_blocks_list))
def scatter_slots_list(
    sources: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], slot_mapping: torch.Tensor
) -> None:
    """Write to the same slots of several caches, with one launch for every eight caches.

    Examples:
        >>> hidden, gates = torch.zeros(4, 2, 8), torch.zeros(4, 2, 3)
        >>> vectors = [torch.randn(2, 8), torch.randn(2, 3)]
        >>> pc.scatter_slots_list(vectors, [hidden, gates], torch.tensor([6, 1]))
        >>> torch.equal(hidden[3, 0], vectors[0][0]) and torch.equal(gates[0, 1], vectors[1][1])
        True
    """
