"""pc.merge_attention against the same formula in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..harness.inputs import Call, Draw, Expected, Inputs, default_dtype, roundings
from ..harness.registry import Benchmark, Case, case, in_torch, ours


def merge_inputs(tokens: int, heads: int, head_dim: int, device: torch.device, rotate: int) -> Inputs:
    """Return calls with two results and their log-sum-exps."""
    dtype, elements = default_dtype(device), tokens * heads

    def calls(draw: Draw, copies: int) -> Iterable[Call]:
        for _ in range(copies):
            outs = [draw(tokens, heads, head_dim).to(dtype) for _ in range(2)]
            yield Call(out_a=outs[0], lse_a=draw(tokens, heads), out_b=outs[1], lse_b=draw(tokens, heads))

    def reference(call: Call) -> Iterable[Expected]:
        """Allow one rounding of the result, and of float32 for the log-sum-exp."""
        out, lse = _torch(Call(**{name: tensor.double() for name, tensor in vars(call).items()}))
        yield Expected(out, lambda got: got[0], roundings(out, dtype, 1) + 1e-5)
        yield Expected(lse, lambda got: got[1], 1e-5)

    moved = elements * (3 * head_dim * dtype.itemsize + 12)
    return Inputs(calls, reference, moved, 3 * elements * head_dim, device, rotate)


def _torch(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(call.lse_a, call.lse_b)
    a, b = ((x - lse).exp()[..., None] for x in (call.lse_a, call.lse_b))
    return (call.out_a * a + call.out_b * b).to(call.out_a.dtype), lse


def _case(device: str, tokens: int, heads: int, head_dim: int, quick: bool = False) -> Case:
    columns = {"count": tokens, "heads": heads, "head_dim": head_dim}
    return case(f"{tokens} tokens, {heads}x{head_dim}", device, quick, merge_inputs, tokens, heads, head_dim, **columns)


BENCHMARKS = (
    Benchmark(
        "merge_attention",
        (
            _case("cpu", 1024, 32, 128, True),
            _case("cuda", 32, 32, 128),
            _case("cuda", 2048, 32, 128, True),
            _case("cuda", 16384, 64, 64),
        ),
        (ours("merge_attention"), in_torch("torch logaddexp", _torch)),
    ),
)
