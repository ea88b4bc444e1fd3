"""pc.reshape_and_cache against indexed assignment and vLLM's operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pc

from ..harness.registry import OURS, Benchmark, Case, Provider, UnsupportedError, WrongError
from .attention_peers import vllm_version


@dataclass(frozen=True)
class WriteCall:
    """Tensors of one call, named as the operator names them."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    scale: torch.Tensor | None


class WriteInputs:
    """Calls that write disjoint slots of one pair of caches."""

    flops = 0

    def __init__(
        self, tokens: int, kv_heads: int, head_dim: int, stored: str | None, device: torch.device, rotate: int
    ) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        code: torch.dtype = getattr(torch, stored) if stored else dtype
        self.bytes = tokens * (2 * kv_heads * head_dim * (dtype.itemsize + code.itemsize) + 8)
        copies = max(2, min(16, -(-rotate // self.bytes)))
        blocks = -(-tokens // 16) * copies
        caches = [torch.zeros(blocks, 16, kv_heads, head_dim, device=device).to(code) for _ in range(2)]
        order = torch.randperm(blocks * 16, generator=torch.Generator().manual_seed(0)).to(device)
        scale = torch.full((1,), 0.03, device=device) if stored else None
        generator = torch.Generator(device).manual_seed(0)
        self.calls = []
        for i in range(copies):
            key, value = (
                torch.randn(tokens, kv_heads, head_dim, generator=generator, device=device).to(dtype) for _ in range(2)
            )
            self.calls.append(WriteCall(key, value, *caches, order[i * tokens : (i + 1) * tokens], scale))

    def check(self, call: WriteCall, run: Callable[[], Any]) -> float:
        """Bit for bit what PyTorch's conversion writes; where two codes lie equally near, either."""
        for cache in (call.key_cache, call.value_cache):
            cache.zero_()
        run()
        for given, cache in ((call.key, call.key_cache), (call.value, call.value_cache)):
            got = cache.flatten(0, 1).view(torch.uint8)[call.slot_mapping].view(cache.dtype)
            expected = _code(given, cache, call.scale)
            if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
                steps = (got.float() - expected.float()).abs() / expected.float().abs().clamp_min(1)
                if call.scale is None or float(steps.max()) > 0.125 or float((steps > 0).float().mean()) > 0.01:
                    raise WrongError("bits differ from those that indexing writes")
        return 0.0


def _code(source: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return source
    codes = source.float() / scale
    return codes.round().clamp(-128, 127).to(torch.int8) if cache.dtype == torch.int8 else codes.to(cache.dtype)


def _ours(call: WriteCall) -> Callable[[], None]:
    return lambda: pc.reshape_and_cache(
        call.key, call.value, call.key_cache, call.value_cache, call.slot_mapping, call.scale, call.scale
    )


def _indexing(call: WriteCall) -> Callable[[], None]:
    def run() -> None:
        for source, cache in ((call.key, call.key_cache), (call.value, call.value_cache)):
            if cache.dtype.itemsize == 1:
                cache.view(torch.uint8).flatten(0, 1)[call.slot_mapping] = _code(source, cache, call.scale).view(
                    torch.uint8
                )
            else:
                cache.flatten(0, 1)[call.slot_mapping] = source

    return run


def _vllm(call: WriteCall) -> Callable[[], None]:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    if call.key_cache.dtype == torch.int8:
        raise UnsupportedError("int8 cache with one scale")
    one = torch.ones(1, device=call.key.device) if call.scale is None else call.scale
    kind = "auto" if call.scale is None else "fp8"
    return functools.partial(
        triton_reshape_and_cache_flash,
        call.key,
        call.value,
        call.key_cache,
        call.value_cache,
        call.slot_mapping,
        kind,
        one,
        one,
    )


def _case(
    device: str, tokens: int, kv_heads: int, head_dim: int, stored: str | None = None, quick: bool = False
) -> Case:
    name = f"{tokens} tokens, KV {kv_heads}x{head_dim}" + (f" as {stored}" if stored else "")
    conditions = {"count": str(tokens), "features": f"{kv_heads}x{head_dim}", "block_size": "16", "cache": stored or ""}

    def build(where: torch.device, rotate: int) -> WriteInputs:
        return WriteInputs(tokens, kv_heads, head_dim, stored, where, rotate)

    return Case(name, build, quick, device, conditions)


BENCHMARK = Benchmark(
    "reshape_and_cache",
    (
        _case("cpu", 8, 8, 128, quick=True),
        _case("cpu", 1024, 8, 128, quick=True),
        _case("cpu", 1024, 8, 128, "int8"),
        *(_case("cuda", tokens, 8, 128, quick=tokens == 2048) for tokens in (1, 8, 128, 2048, 16384)),
        _case("cuda", 2048, 4, 64),
        _case("cuda", 2048, 8, 128, "float8_e4m3fn"),
        _case("cuda", 2048, 8, 128, "int8"),
    ),
    (
        Provider(OURS, _ours, lambda: pc.__version__),
        Provider("torch indexing", _indexing, lambda: torch.__version__),
        Provider("vLLM reshape_and_cache", _vllm, vllm_version, "cuda"),
    ),
)
