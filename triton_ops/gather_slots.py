"""The operator that gathers token vectors of a cache: out[i] = cache[slot // block_size, slot % block_size].

Slot -1 gives zeros. It reads and writes the bytes of num_tokens vectors once. It computes nothing, so it takes every
dtype and changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._copy.ops import SLOTS, empty_rows, move_rows
from ._core.operator import operator
from .gather_blocks import gather_blocks, gather_blocks_list


@operator(run=move_rows, docs_from=(gather_blocks,))
def gather_slots(
    cache: torch.Tensor, slot_mapping: torch.Tensor, device: torch.device | str | None = None
) -> torch.Tensor:
    """Gather the vectors of tokens from their slots into a packed tensor.

    If the index is in host memory, and either the cache or the result is on a device, the copy engine moves long
    contiguous runs.

    Args:
        slot_mapping: `[num_tokens]` int64 or int32, block number * block_size + offset. -1 gives zeros.

    Returns:
        `[num_tokens, *features]`, contiguous, with the cache's dtype.

    Examples:
        >>> cache = torch.arange(8.0).view(4, 2, 1)  # 4 blocks of 2 slots, a feature each
        >>> pc.gather_slots(cache, torch.tensor([6, 7, -1, 2])).T
        tensor([[6., 7., 0., 2.]])
    """
    return empty_rows(cache, SLOTS, slot_mapping, device)


@operator(run=move_rows, docs_from=(gather_slots, gather_blocks_list))
def gather_slots_list(
    caches: Sequence[torch.Tensor], slot_mapping: torch.Tensor, device: torch.device | str | None = None
) -> list[torch.Tensor]:
    """Gather the same slots of several caches, with one launch for every eight caches.

    Returns:
        One tensor for each cache.

    Examples:
        >>> keys, values = torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 128)
        >>> k, v = pc.gather_slots_list([keys, values], torch.tensor([40, 41, 7]))
        >>> k.shape, v.shape
        (torch.Size([3, 2, 64]), torch.Size([3, 2, 128]))
    """
    return [empty_rows(cache, SLOTS, slot_mapping, device) for cache in caches]
