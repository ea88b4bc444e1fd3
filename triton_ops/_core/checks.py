"""Checks of arguments, with errors that name the argument, what it got and what it needs; and debug mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from numbers import Real
from operator import index
from typing import Any

import torch
from torch.autograd import forward_ad

from .runtime import KERNELS_ON_CPU, is_set

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INT32 = (torch.int32,)
INDEX_DTYPES = (torch.int32, torch.int64)
CACHE_LAYOUT = "[num_blocks, block_size, num_kv_heads, head_dim]"
VALUE_LAYOUT = f"{CACHE_LAYOUT} like key_cache"

_debug = is_set("PC_DEBUG")


def debug_mode_enabled() -> bool:
    """Return whether operators on device tensors check the values of block tables, lengths and slots."""
    return _debug


def set_debug_mode(enabled: bool) -> None:
    """Turn value checks on device tensors on or off. The environment variable PC_DEBUG=1 turns them on at the start.

    The checks cost a synchronization per call. On CPU tensors they always run, because reading values there is free.

    Examples:
        >>> pc.set_debug_mode(True)  # operators on a GPU now refuse a block number that is out of range
        >>> pc.set_debug_mode(False)
    """
    global _debug
    _debug = bool(enabled)


def reads_values(tensor: torch.Tensor) -> bool:
    """Return whether checks may read values, which is free on the CPU but synchronizes with a device."""
    return _debug or tensor.is_cpu


def on_host(*tensors: torch.Tensor) -> bool:
    """Return whether operators on these tensors run in PyTorch on the CPU, not as kernels."""
    return not KERNELS_ON_CPU and not any(t.is_cuda for t in tensors)


def bad_argument(name: str, got: object, needs: str, error: type[Exception] = ValueError) -> Exception:
    """Return the error for argument `name`. Call it only after a check has failed, because it formats text."""
    return error(f"{name}: got {got}, needs {needs}")


def check_integer(name: str, value: Any, least: int | None = None, bits: int = 63) -> int:
    """Return an integer argument as an int, or raise an error that names the argument.

    Raises:
        TypeError: The value is a bool or no integer.
        ValueError: `least` is given, and the value is outside [least, 2**bits).
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise bad_argument(name, repr(value), "an int", TypeError)
    if least is not None and not least <= number < 1 << bits:
        raise bad_argument(name, number, f"at least {least}" + (f" and below 2**{bits}" if number > 0 else ""))
    return number


def check_share(name: str, value: Any) -> float:
    """Return an argument that is a fraction, 0 to 1, as a float, or raise an error that names the argument.

    Raises:
        TypeError: The value is a bool or no number.
        ValueError: The value is outside 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise bad_argument(name, type(value).__name__, "a number from 0 to 1", TypeError)
    share = float(value)
    if not 0 <= share <= 1:
        raise bad_argument(name, value, "0 to 1")
    return share


def describe(tensor: object) -> str:
    """Return the dtype, shape and device of a tensor, or the type of another object, for an error message."""
    if not isinstance(tensor, torch.Tensor):
        return "None" if tensor is None else type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} on {tensor.device}"


def check_tensor(
    name: str,
    value: object,
    layout: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    sizes: Sequence[int | None] = (),
    rows: bool = False,
) -> None:
    """Check the type, rank, dtype, device, sizes and strides of a tensor argument, from metadata alone.

    Args:
        name: The argument.
        value: Its value.
        layout: The dimensions, such as "[num_seqs, max_blocks]", from which the rank follows.
        dtypes: The dtypes that it may have.
        device: Its device; None: any.
        sizes: The sizes that its first dimensions must have, None for any.
        rows: Whether its last dimension must be contiguous.

    Raises:
        TypeError: The value is not a tensor, or its dtype is not in `dtypes`.
        ValueError: The rank, the device, a size or a stride is wrong.
    """
    if not isinstance(value, torch.Tensor):
        raise bad_argument(name, describe(value), f"a tensor {layout}", TypeError)
    if value.dim() != layout.count(",", 0, layout.index("]")) + 1:
        raise bad_argument(name, f"shape {list(value.shape)}", layout)
    if value.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise bad_argument(name, describe(value), f"dtype {names}", TypeError)
    if device is not None and value.device != device:
        raise bad_argument(name, f"device {value.device}", f"device {device}")
    if sizes and value.shape[: len(sizes)] != sizes:
        _check_sizes(name, value, layout, sizes)
    if rows and value.stride(-1) != 1 and value.shape[-1] > 1:
        raise bad_argument(name, f"strides {list(value.stride())}", "a contiguous last dimension")


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Check that no dimension of a tensor that an operator writes is expanded: its elements would share memory."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and size > 1:
            got = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
            raise bad_argument(name, got, "memory for each element, since it is written to; use .clone()")


def is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements in memory. It reads no address, as fake tensors have none."""
    stores = first.untyped_storage()._cdata, second.untyped_storage()._cdata
    return (
        stores[0] == stores[1]
        and first.numel() > 0
        and first.storage_offset() == second.storage_offset()
        and first.shape == second.shape
        and first.stride() == second.stride()
    )


def _check_sizes(name: str, tensor: torch.Tensor, layout: str, sizes: Sequence[int | None]) -> None:
    """Check the sizes of a tensor's first dimensions; see `check_tensor`."""
    if all(size is None or size == found for size, found in zip(sizes, tensor.shape, strict=False)):
        return
    if tensor.dim() == 1:
        raise bad_argument(name, f"{tensor.shape[0]} elements", f"{sizes[0]} ({layout})")
    dimensions = layout.partition("]")[0].removeprefix("[").split(", ")
    needs = [dimension if size is None else str(size) for dimension, size in itertools.zip_longest(dimensions, sizes)]
    raise bad_argument(name, f"shape {list(tensor.shape)}", f"[{', '.join(needs)}]{layout.partition(']')[2]}")


def refuse_grad(operator: object, names: Iterable[str], values: Iterable[object]) -> None:
    """Raise RuntimeError for a tensor, also in a list, that needs a gradient, because no operator has a derivative."""
    has_grad, has_tangents = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not (has_grad or has_tangents):
        return
    for name, value in zip(names, values, strict=False):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            if has_grad and tensor.requires_grad:
                got, needs = "a tensor that requires grad", "torch.no_grad() or .detach(), there is no backward of"
            elif has_tangents and forward_ad.unpack_dual(tensor).tangent is not None:
                got, needs = "a tensor with a forward-mode tangent", ".detach(), there is no derivative of"
            else:
                continue
            raise bad_argument(name, got, f"{needs} {str(operator).removesuffix('.default')}", RuntimeError)


def lowest_entry(name: str, index: torch.Tensor, limit: int, least: int = -1) -> int:
    """Check that least <= entry < limit and return the lowest entry; 0 if there is none or values may not be read."""
    if not index.numel() or not reads_values(index):
        return 0
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < least or high >= limit:
        raise bad_argument(name, f"values from {low} to {high}", f"{least} to {limit - 1}")
    return low


def check_caches(name: str, caches: Sequence[torch.Tensor]) -> None:
    """Check that cache tensors of one call have the same blocks and the same device."""
    layout = "[num_blocks, block_size, *features]"
    if not caches:
        raise bad_argument(name, "an empty list", "at least one tensor")
    for cache in caches:
        if not isinstance(cache, torch.Tensor):
            raise bad_argument(name, describe(cache), f"a tensor {layout}", TypeError)
        if cache.dim() < 2:
            raise bad_argument(name, f"shape {list(cache.shape)}", layout)
        if cache.shape[:2] != caches[0].shape[:2]:
            got = f"shapes {list(caches[0].shape)} and {list(cache.shape)}"
            raise bad_argument(name, got, "the same blocks in all")
        if cache.device != caches[0].device:
            raise bad_argument(name, f"devices {caches[0].device} and {cache.device}", "one device")


def check_rows(name: str, rows: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], count: int, lead: int) -> None:
    """Check packed rows, one tensor for each cache: `[count, *cache.shape[lead:]]` in the cache's dtype."""
    if len(rows) != len(caches):
        raise bad_argument(name, f"{len(rows)} tensors", f"{len(caches)}, one per cache")
    for tensor, cache in zip(rows, caches, strict=True):
        needs = (count, *cache.shape[lead:])
        check_tensor(name, tensor, str([*needs]), (cache.dtype,), sizes=needs)
        if tensor.device != rows[0].device:
            raise bad_argument(name, f"devices {rows[0].device} and {tensor.device}", "one device")


def check_reachable(name: str, tensor: torch.Tensor, index: torch.Tensor, index_name: str) -> None:
    """Check that a kernel can access a tensor: host memory used with an index on a device must be pinned."""
    if index.device not in (tensor.device, torch.device("cpu")) and (tensor.is_cuda or not index.is_cuda):
        raise bad_argument(index_name, f"device {index.device}", f"device {tensor.device} of {name}, or the host")
    if not tensor.is_cuda and index.is_cuda and not tensor.is_pinned():
        raise bad_argument(name, "pageable host memory", f"pinned memory, since {index_name} is on {index.device}")
