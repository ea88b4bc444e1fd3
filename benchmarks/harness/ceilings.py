"""The highest speeds of the machine, measured in the same run as the results that are compared with them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .timing import Run, time_eager


@dataclass(frozen=True)
class Ceilings:
    """The highest speeds of one device.

    Attributes:
        copy: Bytes a second of a large device copy, read plus written.
        matmul: Floating-point operations a second of a large matrix product in the dtype the attention runs in.
    """

    copy: float
    matmul: float

    def seconds(self, bytes_moved: int, flops: int) -> float:
        """Return the least time that so much work takes."""
        return max(bytes_moved / self.copy, flops / self.matmul)


def _best(run: Run, device: torch.device, seconds: float) -> float:
    """Return the shortest time of a call, of eight together on a GPU; a ceiling is a speed that was reached once."""
    return min(time_eager({"": [run] * 8}, device, seconds)[""])


@functools.cache
def measure_ceilings(kind: str, tiny: bool = False) -> Ceilings:
    """Measure a copy of 2 GiB on a GPU or 256 MiB on a CPU, and a product of square matrices.

    Args:
        kind: "cpu" or "cuda".
        tiny: Use small tensors, to test the harness; the numbers mean nothing.
    """
    device = torch.device(kind)
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    size = 1 << 20 if tiny else 1 << 28 if kind == "cpu" else 1 << 31
    side = 64 if tiny else 2048 if kind == "cpu" else 8192
    seconds = 0.01 if tiny else 1.0
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copy = 2 * size / _best(functools.partial(target.copy_, source), device, seconds)
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    matmul = 2 * side**3 / _best(lambda: torch.matmul(a, b, out=out), device, seconds)
    return Ceilings(copy, matmul)
