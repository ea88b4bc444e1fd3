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


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with all the memory around it."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return every byte of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def same(found: torch.Tensor, want: torch.Tensor) -> None:
    """Check that tensors are equal in every byte, those around them included."""
    assert torch.equal(memory(found), memory(want)), f"{int((memory(found) != memory(want)).sum())} bytes differ"


def equal(found: torch.Tensor, want: torch.Tensor) -> None:
    """Check that values are equal bit by bit."""
    assert found.dtype == want.dtype
    assert found.shape == want.shape
    found, want = (t.contiguous().flatten().view(torch.uint8) for t in (found, want))
    assert torch.equal(found, want), f"{int((found != want).sum())} bytes differ"
