"""Functions that copy rows between CPU tensors in PyTorch, with one parallel call for each tensor.

They copy units of up to 16 bytes.

`leading` is the number of first dimensions that count rows: 1, or 2 if rows are slots of blocks. `_as_matrices` gets a
pair of them, for the source and the target.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence

import torch

from .layout import row_bytes, row_layout

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SLAB_BYTES = 1 << 20  # size of the buffer of `copy_rows`
_FEW_BYTES, _FEW_ROWS = 1 << 14, 32  # up to these sizes, wide views and `torch.aminmax` cost more than they save
# Errors after which the general path takes over. An argument may be None, and an empty index has no bounds.
_REFUSALS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)

QUICK_BYTES = 32 << 20
"""From this size on, glibc maps new memory for every result, and `empty` pays off."""

_HUGE_FROM = 4 << 20
_PAGE = 4096
_MADV_HUGEPAGE = 14


def _find_madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's madvise, or None where it does not exist."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = function
    return found


_madvise = _find_madvise()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor. Large tensors on the CPU get huge pages if the system grants them.

    Page faults for 64 MB take several times as long as copying 64 MB.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    size = tensor.untyped_storage().nbytes()
    if _madvise is not None and tensor.is_cpu and size >= _HUGE_FROM:
        begin = -(-tensor.data_ptr() // _PAGE) * _PAGE
        _madvise(begin, (size - _PAGE) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    return tensor


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor in a plain dtype of its element size: indexing does not support every dtype."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _as_matrices(
    source: torch.Tensor, target: torch.Tensor, leading: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both tensors as `[rows, units]` of their widest common unit, or as `[rows]` if a row is one unit.

    Return None if rows are not contiguous or not evenly spaced, or an address is no multiple of the element size.
    """
    itemsize = source.dtype.itemsize
    width = math.prod(source.shape[leading[0] :])
    offsets = int(source.storage_offset() * itemsize) | int(target.storage_offset() * itemsize)
    grain = math.gcd(16, width * itemsize, source.data_ptr() | target.data_ptr() | offsets)
    if source.is_contiguous() and target.is_contiguous():
        flats = source.view(-1, width), target.view(-1, width)
    else:
        layout = row_layout((source, target), leading)
        if layout.sizes or any(block_size > 1 for block_size, _, _ in layout.addresses):
            return None
        grain = min(grain, layout.grain)
        pitches = [step * layout.grain // itemsize for _, step, _ in layout.addresses]
        flats = (
            source.as_strided((math.prod(source.shape[: leading[0]]), width), (pitches[0], 1)),
            target.as_strided((math.prod(target.shape[: leading[1]]), width), (pitches[1], 1)),
        )
    if grain < itemsize:
        return None
    dtype = _BITS[grain]
    if grain == width * itemsize:
        return flats[0].view(dtype).squeeze(1), flats[1].view(dtype).squeeze(1)
    return flats[0].view(dtype), flats[1].view(dtype)


def quick_gather(cache: torch.Tensor, leading: int, index: torch.Tensor) -> torch.Tensor | None:
    """Gather with as few calls of torch as possible, if the cache is contiguous and the result small; else return None.

    For a small result the time before the copy matters: since the last call, the model has evicted this code from the
    processor's caches. `index_select` checks the range of an index. If it refuses the index, the general path
    computes the result, or raises an error that names the argument.
    """
    try:
        if cache.requires_grad or not cache.is_contiguous() or cache.dim() < 2 or index.dim() != 1:
            return None
        rows = cache if leading == 1 else cache.flatten(0, 1)
        if not 0 < index.shape[0] * cache.nbytes < QUICK_BYTES * rows.shape[0]:
            return None
        return torch.index_select(rows, 0, index)
    except _REFUSALS:
        return None


def fits(source: torch.Tensor, cache: torch.Tensor, leading: int, index: torch.Tensor) -> bool:
    """Return whether a source has the cache's dtype and a row for each entry of the index, and neither requires grad.

    Arguments may be None. The result is False then.
    """
    if source is None or cache is None or index is None or source.dtype != cache.dtype:
        return False
    return source.shape == index.shape + cache.shape[leading:] and not (source.requires_grad or cache.requires_grad)


def quick_scatter(source: torch.Tensor, cache: torch.Tensor, leading: int, index: torch.Tensor) -> bool:
    """Scatter between contiguous tensors that fit, with few calls of torch.

    Return False, with nothing done, if it cannot.
    """
    try:
        if not (source.is_contiguous() and cache.is_contiguous() and index.dim() == 1 and source.dim() > 1):
            return False
        rows, target = source, cache
        if source.nbytes > _FEW_BYTES:
            rows, target = source.view(torch.complex128), cache.view(torch.complex128)
        if leading == 2:
            target = target.flatten(0, 1)
        if index.shape[0] <= _FEW_ROWS:
            numbers = index.tolist()
            low, high = min(numbers), max(numbers)
        else:
            low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0 or high >= target.shape[0]:
            return False
        target.index_copy_(0, index, rows)
    except _REFUSALS:
        return False
    return True


def gather_rows(source: torch.Tensor, leading: int, index: torch.Tensor, target: torch.Tensor, lowest: int) -> None:
    """Set target[i] to row index[i] of source, or to zeros if index[i] < 0.

    A `lowest` of 0 or more says that no index is negative.
    """
    if not target.numel():
        return
    if lowest < 0:
        if not source.numel():
            target.zero_()
            return
        holes = torch.nonzero(index < 0).squeeze(1)
        index = index.clamp(min=0)
    matrices = _as_matrices(source, target, (leading, 1))
    if matrices is not None:
        torch.index_select(matrices[0], 0, index, out=matrices[1])
    elif leading == 1:
        as_bits(target).copy_(torch.index_select(as_bits(source), 0, index))
    else:
        block_size = source.shape[1]
        as_bits(target).copy_(as_bits(source)[index // block_size, index % block_size])
    if lowest < 0:
        as_bits(target).index_fill_(0, holes, 0)


def scatter_rows(source: torch.Tensor, target: torch.Tensor, leading: int, index: torch.Tensor, lowest: int) -> None:
    """Set row index[i] of target to source[i], unless index[i] < 0. Arguments are as in `gather_rows`."""
    if not source.numel():
        return
    if lowest < 0:
        kept = torch.nonzero(index >= 0).squeeze(1)
        if not kept.numel():
            return
        first, last = int(kept[0]), int(kept[-1]) + 1
        if last - first == kept.numel():  # padding only at the ends: slices of the other rows need no copy
            source, index = source[first:last], index[first:last]
        else:
            source, index = as_bits(source)[kept].view(source.dtype), index[kept]
    index = index.long()
    matrices = _as_matrices(source, target, (1, leading))
    if matrices is not None:
        matrices[1].index_copy_(0, index, matrices[0])
    elif leading == 1:
        as_bits(target).index_copy_(0, index, as_bits(source))
    else:
        block_size = target.shape[1]
        as_bits(target)[index // block_size, index % block_size] = as_bits(source)


def copy_rows(cache: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor, lowest: tuple[int, int]) -> None:
    """Set cache[target_ids[i]] = cache[source_ids[i]], through a buffer that fits in the processor's cache.

    A source below 0 writes zeros; a target below 0 writes nothing. `lowest` has a lower bound of the sources and one of
    the targets.
    """
    if not cache.numel():
        return
    slab = max(1, _SLAB_BYTES // row_bytes(cache))
    buffer = torch.empty((min(slab, source_ids.shape[0]), *cache.shape[1:]), dtype=cache.dtype)
    for begin in range(0, source_ids.shape[0], slab):
        source, target = source_ids[begin : begin + slab], target_ids[begin : begin + slab]
        part = buffer[: source.shape[0]]
        gather_rows(cache, 1, source, part, lowest[0])
        scatter_rows(part, cache, 1, target, lowest[1])


def join_sequences(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: list[int],
    new: torch.Tensor,
    query_start_loc: list[int],
    out: torch.Tensor,
) -> None:
    """Fill `out` with the rows of each sequence in turn: its cached rows, then its new rows.

    The cached rows are whole blocks and the first part of the next block. Holes, and the rest of `out`, become zeros.
    """
    block_size, begin = cache.shape[1], 0
    is_contiguous = cache.is_contiguous()
    for s, length in enumerate(seq_lens):
        first, last = query_start_loc[s], query_start_loc[s + 1]
        cached = length - (last - first)
        whole, rest = divmod(cached, block_size)
        if whole:
            ids = block_tables[s, :whole]
            blocks = out[begin : begin + whole * block_size].view(whole, *cache.shape[1:])
            lowest = int(ids.amin())
            if is_contiguous and lowest >= 0:
                torch.index_select(cache, 0, ids, out=blocks)
            else:
                gather_rows(cache, 1, ids, blocks, lowest)
        if rest:
            number = int(block_tables[s, whole])
            tail = out[begin + cached - rest : begin + cached]
            tail.copy_(cache[number, :rest]) if number >= 0 else tail.zero_()
        if first < last:
            out[begin + cached : begin + length].copy_(new[first:last])
        begin += length
    if begin < len(out):
        out[begin:].zero_()


def join_rows(cache: torch.Tensor, new: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Set out[i] to slot rows[i] of cache if rows[i] >= 0, to zeros if it is -1, else to row -2 - rows[i] of new."""
    gather_rows(cache, 2, rows, out, -1)
    fresh = torch.nonzero(rows < -1).squeeze(1)
    if fresh.numel():
        scatter_rows(new[-2 - rows[fresh]], out, 1, fresh, 0)
