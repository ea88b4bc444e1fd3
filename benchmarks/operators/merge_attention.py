"""pc.merge_attention against the same formula in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pc

from ..harness.registry import OURS, Benchmark, Case, Provider, WrongError

MergeCall = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class MergeInputs:
    """Two results and their log-sum-exps a call."""

    def __init__(self, tokens: int, heads: int, head_dim: int, device: torch.device, rotate: int) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        elements = tokens * heads
        self.bytes = elements * (3 * head_dim * dtype.itemsize + 12)
        self.flops = 3 * elements * head_dim
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        copies = max(2, min(16, -(-rotate // self.bytes)))
        self.calls: list[MergeCall] = []
        for _ in range(copies):
            outs = [draw(tokens, heads, head_dim).to(dtype) for _ in range(2)]
            lses = [draw(tokens, heads) for _ in range(2)]
            self.calls.append((outs[0], lses[0], outs[1], lses[1]))

    def check(self, call: MergeCall, run: Callable[[], Any]) -> float:
        """Against float64: one rounding of the result, and of float32 for the log-sum-exp."""
        out, lse = run()
        exact_out, exact_lse = _torch(*(x.double() for x in call))
        errors = (out.double() - exact_out).abs().max().item(), (lse.double() - exact_lse).abs().max().item()
        allowed = torch.finfo(out.dtype).eps * exact_out.abs().max().item() + 1e-5
        if not (errors[0] <= allowed and errors[1] <= 1e-5):
            raise WrongError(f"off by {errors[0]:.3g}, {allowed:.3g} at most; lse by {errors[1]:.3g}")
        return errors[0]


def _torch(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - lse).exp()[..., None] for x in (lse_a, lse_b))
    return (out_a * a + out_b * b).to(out_a.dtype), lse


def _case(device: str, tokens: int, heads: int, head_dim: int, quick: bool = False) -> Case:
    conditions = {"count": str(tokens), "heads": str(heads), "head_dim": str(head_dim)}

    def build(where: torch.device, rotate: int) -> MergeInputs:
        return MergeInputs(tokens, heads, head_dim, where, rotate)

    return Case(f"{tokens} tokens, {heads}x{head_dim}", build, quick, device, conditions)


BENCHMARK = Benchmark(
    "merge_attention",
    (
        _case("cpu", 1024, 32, 128, True),
        _case("cuda", 32, 32, 128),
        _case("cuda", 2048, 32, 128, True),
        _case("cuda", 16384, 64, 64),
    ),
    (
        Provider(OURS, lambda call: lambda: pc.merge_attention(*call), lambda: pc.__version__),
        Provider("torch logaddexp", lambda call: lambda: _torch(*call), lambda: torch.__version__),
    ),
)
