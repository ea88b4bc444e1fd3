"""Tensors with gaps in memory, for random calls."""

from __future__ import annotations

import random

import torch


def loose(tensor: torch.Tensor, rand: random.Random, last: bool = True) -> torch.Tensor:
    """Return the same values with other strides, between bytes 0x7F (NaN in half precision and float8).

    Args:
        tensor: A tensor with at least one dimension.
        rand: Draws the places of values.
        last: Whether the last dimension stays contiguous.
    """
    if rand.random() < 0.4 or not tensor.numel():
        return tensor.contiguous()
    order = list(range(tensor.dim() - last))
    if rand.random() < 0.5:
        rand.shuffle(order)
    order += [tensor.dim() - 1] * last
    pads = [rand.choice([0, 0, 0, 1, 2, 8]) for _ in order]
    sizes = [tensor.shape[dim] + pad for dim, pad in zip(order, pads, strict=True)]
    bytes_of = torch.full((*sizes, tensor.element_size()), 0x7F, dtype=torch.uint8)
    if tensor.dtype in (torch.bfloat16, torch.float32, torch.float64):
        bytes_of.fill_(0xFF)
    base = bytes_of.view(tensor.dtype).squeeze(-1)
    for dim, pad in enumerate(pads):
        # A tile in 16 bytes where it begins at 0 or 8 elements in, no such thing elsewhere.
        base = base.narrow(dim, rand.choice([0, pad]), sizes[dim] - pad)
    found = base.permute([order.index(dim) for dim in range(tensor.dim())])
    return found.copy_(tensor)
