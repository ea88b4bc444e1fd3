"""Tensors of one case in several sets, so that each call finds its set cold, and the expected results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class WrongError(Exception):
    """A wrong result; the operation is not timed."""


Call = SimpleNamespace
"""The tensors of one call, with the operator's names."""
Draw = Callable[..., torch.Tensor]


class Expected(NamedTuple):
    """An exact result, a function that reads a call's result, and the allowed error; None means bit for bit."""

    exact: torch.Tensor
    read: Callable[[Any], torch.Tensor]
    allowed: Any = None


class Inputs:
    """Calls of one case.

    Attributes:
        calls: One object for each set, understood by the benchmark's providers.
        bytes: The fewest bytes that a call moves: it reads each input element and writes each output element once.
        flops: The fewest floating-point operations of a call.

    Args:
        calls: Function from one that draws normal numbers on the device, and a number of sets, to the calls.
        reference: Function from a call to its expected results. It also clears what earlier providers wrote.
        held: Bytes of a set, if they differ from the bytes that a call moves.
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
        """Run once and return the largest error; raise WrongError if it is too large."""
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
    """Raise WrongError if bits differ."""
    if got.shape != expected.shape or not torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, expected))):
        raise WrongError("bits differ from those that indexing gives")


def shuffled(count: int, device: torch.device) -> torch.Tensor:
    """Return the numbers below `count` in an order that is the same on every device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)


def default_dtype(device: torch.device) -> torch.dtype:
    """Return float32 for a CPU, bfloat16 for a GPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def paged_batch(
    seq_lens: Sequence[int],
    q_lens: Sequence[int],
    block_size: int,
    numbers: torch.Tensor | None = None,
    absent: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return block tables `[sequences, blocks]`, lengths and query starts of a batch, all int32 on the CPU.

    Args:
        seq_lens: Tokens of each sequence.
        q_lens: Queries of each sequence.
        block_size: Tokens of a block.
        numbers: Blocks of all sequences, those of a sequence in order; None: block 0 everywhere.
        absent: Entry of a table after a sequence's last block.
    """
    counts = [-(-length // block_size) for length in seq_lens]
    tables = torch.full((len(counts), max(counts)), 0 if numbers is None else absent, dtype=torch.int32)
    for row, own in zip(tables, () if numbers is None else numbers.split(counts), strict=numbers is not None):
        row[: len(own)] = own
    starts = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
    return tables, torch.tensor(seq_lens, dtype=torch.int32), starts
