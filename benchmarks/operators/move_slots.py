"""pc.move_slots against gathering, turning in PyTorch and indexed assignment of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pc

from ..harness.registry import OURS, Benchmark, Case, Provider, WrongError
from .rotate_keys import BLOCK_SIZE, HEAD_DIM, turn


@dataclass(frozen=True)
class MoveCall:
    """Tensors of one call, named as the operator names them."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    source_slots: torch.Tensor
    target_slots: torch.Tensor
    deltas: torch.Tensor
    inv_freq: torch.Tensor


class MoveInputs:
    """Four spans of text in one cache, each moved to the end of it by a number of positions of its own."""

    def __init__(self, tokens: int, device: torch.device, rotate: int, kv_heads: int = 8) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.bytes = tokens * (4 * kv_heads * HEAD_DIM * dtype.itemsize + 24)
        self.flops = 3 * tokens * kv_heads * HEAD_DIM
        copies = max(2, min(16, -(-rotate // self.bytes)))
        generator = torch.Generator(device).manual_seed(0)
        blocks = 2 * copies * -(-tokens // BLOCK_SIZE) + 1
        shape = (2, blocks, BLOCK_SIZE, kv_heads, HEAD_DIM)
        caches = torch.randn(shape, generator=generator, device=device).to(dtype)
        inv_freq = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
        spans = torch.tensor([777, -1200, 3, 40], device=device)
        deltas = spans.repeat_interleave(tokens // 4)
        slots = torch.arange(tokens, device=device) + 5
        self.calls = [
            MoveCall(*caches, slots + 2 * i * tokens, slots + (2 * i + 1) * tokens, deltas, inv_freq)
            for i in range(copies)
        ]

    def check(self, call: MoveCall, run: Callable[[], Any]) -> float:
        """Turned keys against float64, values bit for bit."""
        run()
        keys, values = (cache.flatten(0, 1) for cache in (call.key_cache, call.value_cache))
        exact = turn(keys[call.source_slots].double(), call.deltas, call.inv_freq)
        error = (keys[call.target_slots].double() - exact).abs().max().item()
        if not error <= 2 * torch.finfo(keys.dtype).eps * exact.abs().max().item():
            raise WrongError(f"off by {error:.3g}")
        if not torch.equal(values[call.target_slots], values[call.source_slots]):
            raise WrongError("values differ")
        return error


def _torch(call: MoveCall) -> None:
    keys, values = (cache.flatten(0, 1) for cache in (call.key_cache, call.value_cache))
    turned = turn(keys.index_select(0, call.source_slots).float(), call.deltas, call.inv_freq)
    keys.index_copy_(0, call.target_slots, turned.to(keys.dtype))
    values.index_copy_(0, call.target_slots, values.index_select(0, call.source_slots))


def _ours(call: MoveCall) -> None:
    pc.move_slots(call.key_cache, call.value_cache, call.source_slots, call.target_slots, call.deltas, call.inv_freq)


def _case(device: str, tokens: int, quick: bool = False) -> Case:
    conditions = {"count": str(tokens), "heads": "8", "head_dim": str(HEAD_DIM), "block_size": str(BLOCK_SIZE)}
    build = lambda where, rotate: MoveInputs(tokens, where, rotate)  # noqa: E731
    return Case(f"{tokens} tokens, KV 8x128", build, quick, device, conditions)


BENCHMARK = Benchmark(
    "move_slots",
    (
        *(_case("cpu", tokens, True) for tokens in (64, 4096)),
        *(_case("cuda", tokens, tokens == 4096) for tokens in (64, 1024, 4096, 32768)),
    ),
    (
        Provider(OURS, lambda call: lambda: _ours(call), lambda: pc.__version__),
        Provider("torch", lambda call: lambda: _torch(call), lambda: torch.__version__),
    ),
)
