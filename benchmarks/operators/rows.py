"""Inputs of benchmarks that move blocks and token rows, and PyTorch indexing as their rival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pc

from ..harness.registry import OURS, Case, Provider, WrongError

BLOCK_SIZE = 16


@dataclass(frozen=True)
class RowsCall:
    """Tensors of one call.

    Attributes:
        cache: `[num_blocks, block_size, *features]`.
        index: `[n]` block numbers or `[num_tokens]` slots, int64, shuffled.
        targets: Like index, disjoint from it, for copies within the cache.
        source: What is written, of the shape that a gather gives.
    """

    cache: torch.Tensor
    index: torch.Tensor
    targets: torch.Tensor
    source: torch.Tensor


class RowsInputs:
    """Calls on disjoint rows of one cache; `unit` is a block or a token.

    Args:
        unit: "block" or "slot".
        count: Blocks or tokens a call.
        features: Of a token.
        dtype: Of the cache.
        device: Where it lies.
        rotate: Bytes to rotate over.
        expected: What a call must give or leave in the cache; from the call and a copy of the cache before it.
    """

    flops = 0

    def __init__(
        self,
        unit: str,
        count: int,
        features: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        rotate: int,
        expected: Callable[[RowsCall, torch.Tensor], torch.Tensor],
    ) -> None:
        self.expected = expected
        block = (BLOCK_SIZE, *features)
        blocks = count if unit == "block" else -(-count // BLOCK_SIZE)
        block_bytes = torch.Size(block).numel() * dtype.itemsize
        row_bytes = block_bytes if unit == "block" else block_bytes // BLOCK_SIZE
        self.bytes = count * (2 * row_bytes + 8)
        copies = max(2, min(16, -(-rotate // (2 * blocks * block_bytes))))
        generator = torch.Generator(device).manual_seed(0)
        cache = torch.empty(2 * copies * blocks, *block, dtype=dtype, device=device)
        cache.view(torch.uint8).random_(generator=generator)
        units = 2 * copies * (blocks if unit == "block" else blocks * BLOCK_SIZE)
        order = torch.randperm(units, generator=torch.Generator().manual_seed(0)).to(device)
        self.calls = []
        for i in range(copies):
            index, targets = order[2 * i * count : (2 * i + 2) * count].split(count)
            shape = (count, *(block if unit == "block" else features))
            source = torch.empty(shape, dtype=dtype, device=device)
            source.view(torch.uint8).random_(generator=generator)
            self.calls.append(RowsCall(cache, index, targets, source))

    def check(self, call: RowsCall, run: Callable[[], Any]) -> float:
        """Bit for bit; the cache is left as it was."""
        before = call.cache.clone()
        expected = self.expected(call, before)
        got = run()
        after = call.cache.clone() if got is None else got
        call.cache.copy_(before)
        if after.shape != expected.shape or not torch.equal(after.view(torch.uint8), expected.view(torch.uint8)):
            raise WrongError("bits differ from those that indexing gives")
        return 0.0


SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "KV 8x128 bf16": ((8, 128), torch.bfloat16),
    "hidden 4096 bf16": ((4096,), torch.bfloat16),
    "KV 2x64 bf16": ((2, 64), torch.bfloat16),
    "KV 8x128 fp32": ((8, 128), torch.float32),
    "hidden 1024 fp32": ((1024,), torch.float32),
}
# (kind of device, what a token holds, blocks, in --quick)
MATRIX = (
    ("cpu", "KV 8x128 fp32", 64, True),
    ("cpu", "hidden 1024 fp32", 256, True),
    ("cpu", "KV 8x128 fp32", 512, False),
    ("cpu", "hidden 4096 bf16", 4, True),
    ("cpu", "hidden 4096 bf16", 64, True),
    ("cpu", "hidden 4096 bf16", 256, True),
    ("cuda", "KV 8x128 bf16", 64, False),
    ("cuda", "KV 8x128 bf16", 1024, True),
    ("cuda", "KV 8x128 bf16", 8192, False),
    ("cuda", "hidden 4096 bf16", 1024, False),
    ("cuda", "KV 2x64 bf16", 8192, False),
)


def row_cases(unit: str, expected: Callable[[RowsCall, torch.Tensor], torch.Tensor]) -> tuple[Case, ...]:
    """The matrix in blocks or, 16 to a block, in tokens."""
    cases = []
    for device, kind, blocks, quick in MATRIX:
        features, dtype = SHAPES[kind]
        count = blocks if unit == "block" else blocks * BLOCK_SIZE

        def build(where: torch.device, rotate: int, given: tuple[Any, ...] = (count, features, dtype)) -> RowsInputs:
            return RowsInputs(unit, *given, where, rotate, expected)

        conditions = {"unit": unit, "count": str(count), "block_size": str(BLOCK_SIZE), "features": kind}
        cases.append(Case(f"{count} {unit}s, {kind}", build, quick, device, conditions))
    return tuple(cases)


Body = Callable[[RowsCall], Any]


def row_providers(ours: Body, **torch_ways: Body) -> tuple[Provider, ...]:
    """Ours, and PyTorch's ways by name; each body is called with a RowsCall."""

    def prepare(body: Body) -> Callable[[RowsCall], Callable[[], Any]]:
        return lambda call: lambda: body(call)

    return (
        Provider(OURS, prepare(ours), lambda: pc.__version__),
        *(
            Provider(f"torch {name}", prepare(body), lambda: torch.__version__)
            for name, body in torch_ways.items()
        ),
    )  # fmt: skip


def flat(cache: torch.Tensor) -> torch.Tensor:
    """The cache by slots: `[num_blocks * block_size, *features]`."""
    return cache.flatten(0, 1)


def written(cache: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A copy of `cache` with rows replaced."""
    out = cache.clone()
    out[index] = source
    return out
