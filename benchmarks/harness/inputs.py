"""Tensors of one case, several sets of them so that a set is cold when its turn comes again, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class WrongError(Exception):
    """A result is not what it should be: such an operation is not timed."""


Call = SimpleNamespace
"""Tensors of one call, named as the operator names them."""
Draw = Callable[..., torch.Tensor]


class Expected(NamedTuple):
    """An exact result, how to read the one of a call, and the error allowed; None means bit for bit."""

    exact: torch.Tensor
    read: Callable[[Any], torch.Tensor]
    allowed: Any = None


class Inputs:
    """Calls of one case.

    Attributes:
        calls: One object per set, understood by the benchmark's providers.
        bytes: Moved by one call at least: each input element read once, each output element written once.
        flops: Of one call at least.

    Args:
        calls: From a function that draws normal numbers on the device, and how many sets, to them.
        reference: From a call to what is right; it also takes away from caches what an earlier provider wrote.
        held: Bytes of a set, where they are not those that a call moves.
    """

    def __init__(
        self,
        calls: Callable[[Draw, int], Iterable[Any]],
        reference: Callable[[Any], Iterable[Expected]],
        bytes: int,
        flops: int,
        device: torch.device,
        rotate: int,
        held: int = 0,
    ) -> None:
        self.bytes, self.flops, self._reference = bytes, flops, reference
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.calls = list(calls(draw, copies(rotate, held or bytes)))

    def check(self, call: Any, run: Callable[[], Any]) -> float:
        """Runs once and gives the largest error; raises WrongError where it is too large."""
        expected, worst = list(self._reference(call)), 0.0
        got = run()
        for exact, read, allowed in expected:
            found = read(got)
            if allowed is None:
                check_bits(found, exact)
                continue
            error = (found.double() - exact).abs()
            if not bool((error <= allowed).all()):  # a NaN is not
                raise WrongError(
                    f"off by {error.max().item():.3g}, {torch.as_tensor(allowed).max().item():.3g} at most"
                )
            worst = max(worst, error.max().item())
        return worst


def roundings(exact: torch.Tensor, dtype: torch.dtype, count: int = 2) -> float:
    """Return `count` units in the last place of the largest element."""
    return count * torch.finfo(dtype).eps * exact.abs().max().item()


def copies(rotate: int, bytes: int) -> int:
    """Return how many sets of this size hold `rotate` bytes together, 2 to 16."""
    return max(2, min(16, -(-rotate // max(1, bytes))))


def check_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises WrongError where bits differ."""
    if got.shape != expected.shape or not torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, expected))):
        raise WrongError("bits differ from those that indexing gives")


def shuffled(count: int, device: torch.device) -> torch.Tensor:
    """Numbers below `count`, shuffled, the same on every device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU, bfloat16 on a GPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16
