"""Functions that copy rows between CPU tensors in PyTorch, with one parallel call for each tensor.

`leading` is the number of first dimensions that count rows: 1, or 2 if rows are slots of blocks.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .layout import flat_rows, row_bytes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SLAB_BYTES = 1 << 20  # size of the buffer of `copy_rows`

_HUGE_FROM = 32 << 20  # from this size on, glibc maps new memory for every tensor
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


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """Return an uninitialized tensor. Large tensors on the CPU get huge pages if the system grants them.

    Page faults for 64 MB take several times as long as copying 64 MB.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
    size = tensor.untyped_storage().nbytes()
    if _madvise is not None and tensor.is_cpu and not pinned and size >= _HUGE_FROM:
        begin = -(-tensor.data_ptr() // _PAGE) * _PAGE
        _madvise(begin, (size - _PAGE) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    return tensor


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor in a plain dtype of its element size: indexing does not support every dtype."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _widened(source: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors in units of 16 bytes if possible, because `index_copy_` moves single units."""
    places = 0
    for tensor in (source, rows):
        size = tensor.element_size()
        places |= tensor.shape[-1] * size | int(tensor.storage_offset()) * size | tensor.data_ptr()
        for step in tensor.stride()[:-1]:  # a contiguous tensor has any stride where its size is 1
            places |= step * size
    if places % 16 or not (source.is_contiguous() and rows.is_contiguous()) or rows.dim() < 2:
        return source, rows
    return source.view(torch.complex128), rows.view(torch.complex128)


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
    bits, target = as_bits(source), as_bits(target)
    rows = flat_rows(bits, leading)
    if rows is not None:
        torch.index_select(rows, 0, index, out=target)
    else:
        target.copy_(bits[index // bits.shape[1], index % bits.shape[1]])
    if lowest < 0:
        target.index_fill_(0, holes, 0)


def scatter_rows(source: torch.Tensor, target: torch.Tensor, leading: int, index: torch.Tensor, lowest: int) -> None:
    """Set row index[i] of target to source[i], unless index[i] < 0. Arguments are as in `gather_rows`."""
    if not source.numel():
        return
    source, target = as_bits(source), as_bits(target)
    if lowest < 0:
        kept = torch.nonzero(index >= 0).squeeze(1)
        if not kept.numel():
            return
        first, last = int(kept[0]), int(kept[-1]) + 1
        # Padding only at the ends leaves slices of the other rows, which need no copy.
        rest = slice(first, last) if last - first == kept.numel() else kept
        source, index = source[rest], index[rest]
    rows = flat_rows(target, leading)
    if rows is not None:
        source, rows = _widened(source, rows)
        rows.index_copy_(0, index.long(), source)
    else:
        target[index // target.shape[1], index % target.shape[1]] = source


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


def join_sequences(args: Any, cache: torch.Tensor, new: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the rows of each sequence in turn. Holes, and the rest of `out`, become zeros.

    `args` are the arguments of `pc.join_prefix`, or of the operator of lists. New rows are at their `new_positions`, or
    at the end of their sequences. All others are cached.
    """
    block_tables, new_positions, starts = args.block_tables, args.new_positions, args.query_start_loc.tolist()
    block_size, begin = cache.shape[1], 0
    for s, length in enumerate(args.seq_lens.tolist()):
        first, last = starts[s], starts[s + 1]
        own = out[begin : begin + length]
        cached = length - (last - first) if new_positions is None else length
        whole, rest = divmod(cached, block_size)
        if whole:
            ids = block_tables[s, :whole]
            blocks = own[: whole * block_size].view(whole, *cache.shape[1:])
            gather_rows(cache, 1, ids, blocks, int(ids.amin()))
        if rest:
            number = int(block_tables[s, whole])
            tail = own[cached - rest : cached]
            tail.copy_(cache[number, :rest]) if number >= 0 else tail.zero_()
        if new_positions is not None:
            scatter_rows(new[first:last], own, 1, new_positions[first:last], 0)
        elif first < last:
            own[cached:].copy_(new[first:last])
        begin += length
    if begin < len(out):
        out[begin:].zero_()
