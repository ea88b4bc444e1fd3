"""Argument checks of the row-moving operators, from metadata alone but for the range of an index."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._checks import bad_argument, check_tensor, describe, refuse_grad
from .quantize import CODES

INDEX_DTYPES = (torch.int32, torch.int64)
_CACHE_LAYOUT = "[num_blocks, block_size, *features]"


def check_index(name: str, index: torch.Tensor, layout: str) -> None:
    """An index argument is one-dimensional and of int32 or int64."""
    check_tensor(name, index, 1, layout, INDEX_DTYPES)


def check_range(name: str, index: torch.Tensor, limit: int) -> int:
    """Raises ValueError unless every entry is from -1 to limit - 1; gives the lowest, or 0 of none. Reads values."""
    if not index.numel():
        return 0
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < -1 or high >= limit:
        raise bad_argument(name, f"values from {low} to {high}", f"-1 to {limit - 1}")
    return low


def check_caches(name: str, caches: Sequence[torch.Tensor]) -> None:
    """Cache tensors of one call: same blocks, same device, no gradient."""
    if not caches:
        raise bad_argument(name, "an empty list", "at least one tensor")
    for cache in caches:
        if not isinstance(cache, torch.Tensor):
            raise bad_argument(name, describe(cache), f"a tensor {_CACHE_LAYOUT}", TypeError)
        if cache.dim() < 2:
            raise bad_argument(name, f"shape {list(cache.shape)}", _CACHE_LAYOUT)
        if cache.shape[:2] != caches[0].shape[:2]:
            raise bad_argument(
                name, f"shapes {list(caches[0].shape)} and {list(cache.shape)}", "the same blocks in all"
            )
        if cache.device != caches[0].device:
            raise bad_argument(name, f"devices {caches[0].device} and {cache.device}", "one device")
        refuse_grad(**{name: cache})


def check_rows(name: str, rows: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], count: int, lead: int) -> None:
    """Packed rows of the caches in the same places: `[count, *cache.shape[lead:]]`, the cache's dtype."""
    if len(rows) != len(caches):
        raise bad_argument(name, f"{len(rows)} tensors", f"{len(caches)}, one per cache")
    for tensor, cache in zip(rows, caches, strict=True):
        needs = [count, *cache.shape[lead:]]
        check_tensor(name, tensor, len(needs), str(needs), (cache.dtype,))
        if list(tensor.shape) != needs:
            raise bad_argument(name, f"shape {list(tensor.shape)}", str(needs))
        if tensor.device != rows[0].device:
            raise bad_argument(name, f"devices {rows[0].device} and {tensor.device}", "one device")
        refuse_grad(**{name: tensor})


def check_reach(name: str, tensor: torch.Tensor, index: torch.Tensor, index_name: str) -> None:
    """Host memory beside an index on an accelerator has to be pinned, or no kernel reaches it."""
    if tensor.is_cuda:
        if index.is_cuda and index.device != tensor.device:
            raise bad_argument(index_name, f"device {index.device}", f"device {tensor.device} of {name}")
    elif index.is_cuda and not tensor.is_pinned():
        raise bad_argument(name, "pageable host memory", f"pinned memory, since {index_name} is on {index.device}")


def check_quantized(cache: torch.Tensor, scales: torch.Tensor, index: torch.Tensor) -> None:
    """A cache of 8-bit codes with contiguous rows, its scales, and the slots that name its rows."""
    check_caches("cache", [cache])
    if cache.dtype not in CODES:
        raise bad_argument("cache", describe(cache), "dtype float8_e4m3fn or int8", TypeError)
    if not cache[:1, :1].is_contiguous():
        raise bad_argument("cache", f"strides {list(cache.stride())}", "contiguous features")
    check_tensor("scales", scales, 2, "[num_blocks, block_size]", (torch.float32,), cache.device)
    if scales.shape != cache.shape[:2]:
        raise bad_argument("scales", f"shape {list(scales.shape)}", f"{list(cache.shape[:2])}, one per slot of cache")
    check_index("slot_mapping", index, "[num_tokens]")
    check_reach("cache", cache, index, "slot_mapping")
    check_reach("scales", scales, index, "slot_mapping")
