"""The layout of rows of strided tensors in the widest unit in which all of them can be moved."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

MAX_OUTER = 3


Address = tuple[int, int, int]
"""(block_size, block, slot): row i of a tensor begins at (i // block_size) * block + (i % block_size) * slot.

The numbers `block` and `slot` count elements, or in a `RowLayout` grains.
"""


class RowLayout(NamedTuple):
    """A row of several tensors: strided outer dimensions around `inner` contiguous grains. Lengths count grains."""

    grain: int  # bytes, a power of two up to 16 that divides every address, stride and size
    inner: int  # number of grains that are contiguous in all tensors
    sizes: tuple[int, ...]  # of the outer dimensions, innermost first
    addresses: tuple[Address, ...]  # one per tensor
    strides: tuple[tuple[int, ...], ...]  # for each tensor, strides of the outer dimensions, innermost first


def address_of(tensor: torch.Tensor, leading: int) -> Address:
    """Return the address of rows after the first `leading` (1 or 2) dimensions, in elements."""
    if leading == 1:
        return 1, tensor.stride(0), 0
    num_blocks, block_size = tensor.shape[:2]
    block, slot = tensor.stride()[:2]
    if num_blocks <= 1 or block == block_size * slot or block_size == 1:
        return 1, block if block_size == 1 else slot, 0
    return block_size, block, slot


def flat_rows(tensor: torch.Tensor, leading: int) -> torch.Tensor | None:
    """Return a view in which the first dimension counts all rows, or None if slots are not evenly spaced."""
    if leading == 1:
        return tensor
    block_size, step, _ = address_of(tensor, leading)
    if block_size > 1:
        return None
    return tensor.as_strided((tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]), (step, *tensor.stride()[2:]))


def row_layout(tensors: tuple[torch.Tensor, ...], leading: tuple[int, ...]) -> RowLayout:
    """Return the common layout of the tensors' rows, which are the dimensions after the `leading` ones of each.

    All rows have one dtype and one shape, which is not empty.
    """
    itemsize = tensors[0].dtype.itemsize
    shape = tensors[0].shape[leading[0] :]
    strides = [t.stride()[lead:] for t, lead in zip(tensors, leading, strict=True)]
    inner = 1
    outer: list[tuple[int, tuple[int, ...]]] = []
    for axis in range(len(shape) - 1, -1, -1):
        size, steps = shape[axis], tuple(s[axis] for s in strides)
        if size == 1:
            continue
        if not outer and all(step == inner for step in steps):
            inner *= size
        elif outer and all(step == last * outer[-1][0] for step, last in zip(steps, outer[-1][1], strict=True)):
            outer[-1] = (outer[-1][0] * size, outer[-1][1])
        else:
            outer.append((size, steps))
    addresses = [address_of(t, lead) for t, lead in zip(tensors, leading, strict=True)]
    grain = math.gcd(16, inner * itemsize, *(t.data_ptr() for t in tensors))
    for _, block, slot in addresses:
        grain = math.gcd(grain, block * itemsize, slot * itemsize)
    for _, steps in outer:
        grain = math.gcd(grain, *(step * itemsize for step in steps))
    return RowLayout(
        grain,
        inner * itemsize // grain,
        tuple(size for size, _ in outer),
        tuple((size, block * itemsize // grain, slot * itemsize // grain) for size, block, slot in addresses),
        tuple(tuple(steps[t] * itemsize // grain for _, steps in outer) for t in range(len(tensors))),
    )


def row_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes of one row after the first dimension."""
    return math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
