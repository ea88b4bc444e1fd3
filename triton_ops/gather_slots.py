"""Gathers token rows of a cache: out[i] = cache[slot // block_size, slot % block_size], zeros where the slot is -1.

Reads and writes the bytes of num_tokens rows once; nothing is computed, so every dtype is served and no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._library import operator
from ._rows.ops import SLOTS, Gather

_rows = Gather("gather_slots", SLOTS)


@operator(cpu=_rows.cpu, launch=_rows.launch, direct=True)
def gather_slots(
    cache: torch.Tensor, slot_mapping: torch.Tensor, device: torch.device | str | None = None
) -> torch.Tensor:
    """Gathers the rows of tokens from their slots into a packed tensor.

    Args:
        cache: `[num_blocks, block_size, *features]`, any dtype and strides; on a device, or in host memory.
        slot_mapping: `[num_tokens]` int64 or int32, block number * block_size + offset; -1 gives zeros. On a device it
            needs the cache there or pinned. In host memory with the cache or the result on a device, long contiguous
            runs go through the copy engine.
        device: Where the result goes; None: where slot_mapping is if that is a device, else where the cache is. A
            result in host memory gathered from a device is pinned, and there once the current stream is synchronized.

    Returns:
        `[num_tokens, *features]`, contiguous, cache's dtype.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device; with slots in host memory, and in debug mode, also a slot out of range.
        RuntimeError: A cache that requires grad while grad mode is on.

    Examples:
        >>> cache = torch.arange(8.0).view(4, 2, 1)  # 4 blocks of 2 slots, a feature each
        >>> pc.gather_slots(cache, torch.tensor([6, 7, -1, 2])).T
        tensor([[6., 7., 0., 2.]])
    """
    return _rows.empty(cache, slot_mapping, device)


@operator(cpu=_rows.cpu_list, launch=_rows.launch_list)
def gather_slots_list(
    caches: Sequence[torch.Tensor], slot_mapping: torch.Tensor, device: torch.device | str | None = None
) -> list[torch.Tensor]:
    """Gathers the same slots of several caches, in one launch per eight of them.

    Args:
        caches: Like `cache` of `pc.gather_slots`; one device and the same num_blocks and block_size, features and
            dtypes of their own.
        slot_mapping: As in `pc.gather_slots`.
        device: As in `pc.gather_slots`.

    Returns:
        One tensor per cache.

    Raises:
        TypeError: As in `pc.gather_slots`.
        ValueError: As in `pc.gather_slots`, and for caches that do not agree.
        RuntimeError: As in `pc.gather_slots`.

    Examples:
        >>> keys, values = torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 128)
        >>> k, v = pc.gather_slots_list([keys, values], torch.tensor([40, 41, 7]))
        >>> k.shape, v.shape
        (torch.Size([3, 2, 64]), torch.Size([3, 2, 128]))
    """
    return [_rows.empty(cache, slot_mapping, device) for cache in caches]
