"""pc.rotate_keys against gather, rotation in PyTorch and indexed assignment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pc

from ..harness.registry import OURS, Benchmark, Case, Provider, WrongError

BLOCK_SIZE, HEAD_DIM = 16, 128


@dataclass(frozen=True)
class RotateCall:
    """Tensors of one call, named as the operator names them."""

    key_cache: torch.Tensor
    source_ids: torch.Tensor
    target_ids: torch.Tensor
    deltas: torch.Tensor
    inv_freq: torch.Tensor


class RotateInputs:
    """Blocks of one cache, shuffled, each moved to a block of its own by a number of positions of its own."""

    def __init__(self, blocks: int, device: torch.device, rotate: int, kv_heads: int = 8) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.bytes = blocks * (2 * BLOCK_SIZE * kv_heads * HEAD_DIM * dtype.itemsize + 20)
        self.flops = 3 * blocks * BLOCK_SIZE * kv_heads * HEAD_DIM
        copies = max(2, min(16, -(-rotate // self.bytes)))
        generator = torch.Generator(device).manual_seed(0)
        shape = (2 * copies * blocks, BLOCK_SIZE, kv_heads, HEAD_DIM)
        cache = torch.randn(shape, generator=generator, device=device).to(dtype)
        order = torch.randperm(len(cache), generator=torch.Generator().manual_seed(0)).to(device)
        inv_freq = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
        deltas = torch.randint(-4096, 4096, (blocks,), generator=generator, device=device, dtype=torch.int32)
        self.calls = [
            RotateCall(cache, *order[2 * i * blocks : (2 * i + 2) * blocks].split(blocks), deltas, inv_freq)
            for i in range(copies)
        ]

    def check(self, call: RotateCall, run: Callable[[], Any]) -> float:
        """Re-rotated keys against float64."""
        run()
        exact = turn(call.key_cache[call.source_ids].double(), call.deltas, call.inv_freq)
        error = (call.key_cache[call.target_ids].double() - exact).abs().max().item()
        if not error <= 2 * torch.finfo(call.key_cache.dtype).eps * exact.abs().max().item():
            raise WrongError(f"off by {error:.3g}")
        return error


def turn(keys: torch.Tensor, deltas: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Keys `[n, ..., head_dim]` that move by `[n]` positions, in their own dtype."""
    angles = deltas.double().view(-1, *[1] * (keys.ndim - 1)) * inv_freq.double()
    cos, sin = (part.to(keys.dtype) for part in (angles.cos(), angles.sin()))
    a, b = keys.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _torch(call: RotateCall) -> None:
    turned = turn(call.key_cache.index_select(0, call.source_ids).float(), call.deltas, call.inv_freq)
    call.key_cache.index_copy_(0, call.target_ids, turned.to(call.key_cache.dtype))


def _ours(call: RotateCall) -> None:
    pc.rotate_keys(call.key_cache, call.source_ids, call.target_ids, call.deltas, call.inv_freq)


def _case(device: str, blocks: int, quick: bool = False) -> Case:
    conditions = {"count": str(blocks), "heads": "8", "head_dim": str(HEAD_DIM), "block_size": str(BLOCK_SIZE)}
    build = lambda where, rotate: RotateInputs(blocks, where, rotate)  # noqa: E731
    return Case(f"{blocks} blocks, KV 8x128", build, quick, device, conditions)


BENCHMARK = Benchmark(
    "rotate_keys",
    (
        *(_case("cpu", blocks, True) for blocks in (4, 256)),
        *(_case("cuda", blocks, blocks == 256) for blocks in (4, 64, 256, 4096)),
    ),
    (
        Provider(OURS, lambda call: lambda: _ours(call), lambda: pc.__version__),
        Provider("torch", lambda call: lambda: _torch(call), lambda: torch.__version__),
    ),
)
