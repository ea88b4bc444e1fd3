"""pc.rope_and_cache against rotation in PyTorch followed by a cache write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pc

from ..harness.registry import OURS, Benchmark, Case, Provider, WrongError


@dataclass(frozen=True)
class RopeCall:
    """Tensors of one call, named as the operator names them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor


class RopeInputs:
    """Tokens at random positions, written to disjoint shuffled slots of one pair of caches."""

    def __init__(self, tokens: int, device: torch.device, rotate: int, heads: int = 32, kv_heads: int = 8) -> None:
        dtype, head_dim = torch.float32 if device.type == "cpu" else torch.bfloat16, 128
        self.bytes = tokens * (2 * (heads + 2 * kv_heads) * head_dim * dtype.itemsize + 4 * head_dim + 16)
        self.flops = 3 * tokens * (heads + kv_heads) * head_dim
        copies = max(2, min(16, -(-rotate // self.bytes)))
        blocks = -(-tokens // 16) * copies
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        caches = [torch.zeros(blocks, 16, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2)]
        order = torch.randperm(blocks * 16, generator=torch.Generator().manual_seed(0)).to(device)
        angles = torch.arange(8192, device=device)[:, None] * 1e4 ** (-torch.arange(0, 1, 2 / head_dim, device=device))
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.calls = [
            RopeCall(
                draw(tokens, heads, head_dim),
                *(draw(tokens, kv_heads, head_dim) for _ in range(2)),
                torch.randint(0, 8192, (tokens,), generator=generator, device=device),
                table,
                *caches,
                order[i * tokens : (i + 1) * tokens],
            )
            for i in range(copies)
        ]

    def check(self, call: RopeCall, run: Callable[[], Any]) -> float:
        """Rotated queries and cached keys against float64; values bit for bit."""
        got = run()
        cos, sin = call.cos_sin[call.positions].double().chunk(2, dim=1)
        cached = [cache.flatten(0, 1)[call.slot_mapping] for cache in (call.key_cache, call.value_cache)]
        worst = 0.0
        for rotated, given in ((got, call.query), (cached[0], call.key)):
            exact = _rotate(given.double(), cos, sin)
            error = (rotated.double() - exact).abs().max().item()
            if not error <= 2 * torch.finfo(given.dtype).eps * exact.abs().max().item():
                raise WrongError(f"off by {error:.3g}")
            worst = max(worst, error)
        if not torch.equal(cached[1], call.value):
            raise WrongError("cached values differ")
        return worst


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _torch(call: RopeCall) -> torch.Tensor:
    cos, sin = call.cos_sin[call.positions].chunk(2, dim=1)
    call.key_cache.flatten(0, 1)[call.slot_mapping] = _rotate(call.key, cos, sin)
    call.value_cache.flatten(0, 1)[call.slot_mapping] = call.value
    return _rotate(call.query, cos, sin)


def _ours(call: RopeCall) -> torch.Tensor:
    out: torch.Tensor = pc.rope_and_cache(
        call.query,
        call.key,
        call.value,
        call.positions,
        call.cos_sin,
        call.key_cache,
        call.value_cache,
        call.slot_mapping,
    )
    return out


def _case(device: str, tokens: int, quick: bool = False) -> Case:
    conditions = {"count": str(tokens), "heads": "32/8", "head_dim": "128", "block_size": "16"}
    return Case(
        f"{tokens} tokens, heads 32/8",
        lambda where, rotate: RopeInputs(tokens, where, rotate),
        quick,
        device,
        conditions,
    )


BENCHMARK = Benchmark(
    "rope_and_cache",
    (
        _case("cpu", 8, True),
        _case("cpu", 1024, True),
        *(_case("cuda", tokens, tokens in (8, 2048)) for tokens in (1, 8, 128, 2048, 16384)),
    ),
    (
        Provider(OURS, lambda call: lambda: _ours(call), lambda: pc.__version__),
        Provider("torch", lambda call: lambda: _torch(call), lambda: torch.__version__),
    ),
)
