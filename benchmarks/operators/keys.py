"""Operators that write and turn keys, against indexing and rotation in PyTorch and vLLM's cache write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from ..harness.inputs import Call, Draw, Expected, Inputs, default_dtype, roundings, shuffled
from ..harness.registry import Benchmark, Provider, UnsupportedError, case, in_torch, ours
from .attention_peers import vllm_version

BLOCK, HEAD_DIM = 16, 128


def write_inputs(
    tokens: int, kv_heads: int, head_dim: int, stored: str | None, device: torch.device, rotate: int
) -> Inputs:
    """Return calls that write disjoint slots of one pair of caches."""
    dtype = default_dtype(device)
    code: torch.dtype = getattr(torch, stored) if stored else dtype

    def calls(draw: Draw, copies: int) -> Iterable[Call]:
        blocks = -(-tokens // BLOCK) * copies
        key, value = (torch.zeros(blocks, BLOCK, kv_heads, head_dim, device=device).to(code) for _ in range(2))
        scale = torch.full((1,), 0.03, device=device) if stored else None
        for slots in shuffled(blocks * BLOCK, device)[: copies * tokens].split(tokens):
            new = [draw(tokens, kv_heads, head_dim).to(dtype) for _ in range(2)]
            names = {"key_cache": key, "value_cache": value, "slot_mapping": slots, "k_scale": scale, "v_scale": scale}
            yield Call(key=new[0], value=new[1], **names)

    def reference(call: Call) -> Iterable[Expected]:
        """Expect the codes that PyTorch's conversion writes; between two codes that are equally near, allow either."""
        for source, cache in ((call.key, call.key_cache), (call.value, call.value_cache)):
            cache.zero_()
            exact = _code(source, cache, call.k_scale)

            def read(got: object, cache: torch.Tensor = cache) -> torch.Tensor:
                return cache.flatten(0, 1).view(torch.uint8)[call.slot_mapping].view(cache.dtype)

            def differ(got: object, exact: torch.Tensor = exact, read: Callable[..., torch.Tensor] = read):  # type: ignore[no-untyped-def]
                return (read(got).float() != exact.float()).double().mean()

            if stored:
                yield Expected(exact.double(), read, exact.double().abs().clamp_min(1) / 8)
                yield Expected(torch.zeros((), dtype=torch.float64, device=device), differ, 0.01)
            else:
                yield Expected(exact, read)

    moved = tokens * (2 * kv_heads * head_dim * (dtype.itemsize + code.itemsize) + 8)
    return Inputs(calls, reference, moved, 0, device, rotate)


def _code(source: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return source
    codes = source.float() / scale
    return codes.round().clamp(-128, 127).to(torch.int8) if cache.dtype == torch.int8 else codes.to(cache.dtype)


def _write_by_indexing(call: Call) -> None:
    for source, cache in ((call.key, call.key_cache), (call.value, call.value_cache)):
        if cache.dtype.itemsize == 1:
            codes = _code(source, cache, call.k_scale).view(torch.uint8)
            cache.view(torch.uint8).flatten(0, 1)[call.slot_mapping] = codes
        else:
            cache.flatten(0, 1)[call.slot_mapping] = source


def _vllm_write(call: Call) -> Callable[[], None]:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    if call.key_cache.dtype == torch.int8:
        raise UnsupportedError("int8 cache with one scale")
    one = torch.ones(1, device=call.key.device) if call.k_scale is None else call.k_scale
    tensors = (call.key, call.value, call.key_cache, call.value_cache, call.slot_mapping)
    return functools.partial(
        triton_reshape_and_cache_flash, *tensors, "auto" if call.k_scale is None else "fp8", one, one
    )


def _write_case(device: str, tokens: int, kv_heads: int, head_dim: int, stored: str | None = None, quick: bool = False):  # type: ignore[no-untyped-def]
    name = f"{tokens} tokens, KV {kv_heads}x{head_dim}" + (f" as {stored}" if stored else "")
    columns = {"count": tokens, "features": f"{kv_heads}x{head_dim}", "block_size": BLOCK, "cache": stored or ""}
    return case(name, device, quick, write_inputs, tokens, kv_heads, head_dim, stored, **columns)


def rope_inputs(tokens: int, heads: int, kv_heads: int, device: torch.device, rotate: int) -> Inputs:
    """Return tokens at random positions, written to disjoint shuffled slots of one pair of caches."""
    dtype = default_dtype(device)

    def calls(draw: Draw, copies: int) -> Iterable[Call]:
        blocks = -(-tokens // BLOCK) * copies
        key, value = (torch.zeros(blocks, BLOCK, kv_heads, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
        angles = torch.arange(8192, device=device)[:, None] * _frequencies(device)
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
        for slots in shuffled(blocks * BLOCK, device)[: copies * tokens].split(tokens):
            new = [draw(tokens, count, HEAD_DIM).to(dtype) for count in (heads, kv_heads, kv_heads)]
            positions = torch.randint(0, 8192, (tokens,), device=device)
            names = {"positions": positions, "cos_sin": table, "key_cache": key, "value_cache": value}
            yield Call(query=new[0], key=new[1], value=new[2], **names, slot_mapping=slots)

    def reference(call: Call) -> Iterable[Expected]:
        cos, sin = call.cos_sin[call.positions].double()[:, None].chunk(2, dim=2)
        call.key_cache.zero_()
        call.value_cache.zero_()
        for given, read in ((call.query, lambda got: got), (call.key, lambda got: _slots(call.key_cache, call))):
            exact = _rotated(given.double(), cos, sin)
            yield Expected(exact, read, roundings(exact, dtype))
        yield Expected(call.value, lambda got: _slots(call.value_cache, call))

    moved = tokens * (2 * (heads + 2 * kv_heads) * HEAD_DIM * dtype.itemsize + 4 * HEAD_DIM + 16)
    return Inputs(calls, reference, moved, 3 * tokens * (heads + kv_heads) * HEAD_DIM, device, rotate)


def _slots(cache: torch.Tensor, call: Call) -> torch.Tensor:
    return cache.flatten(0, 1)[call.slot_mapping]


def _frequencies(device: torch.device) -> torch.Tensor:
    return 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _rope_in_torch(call: Call) -> torch.Tensor:
    cos, sin = call.cos_sin[call.positions][:, None].chunk(2, dim=2)
    call.key_cache.flatten(0, 1)[call.slot_mapping] = _rotated(call.key, cos, sin)
    call.value_cache.flatten(0, 1)[call.slot_mapping] = call.value
    return _rotated(call.query, cos, sin)


def _rope_case(device: str, tokens: int, quick: bool = False):  # type: ignore[no-untyped-def]
    columns = {"count": tokens, "heads": "32/8", "head_dim": HEAD_DIM, "block_size": BLOCK}
    return case(f"{tokens} tokens, heads 32/8", device, quick, rope_inputs, tokens, 32, 8, **columns)


def move_inputs(tokens: int, kv_heads: int, device: torch.device, rotate: int) -> Inputs:
    """Return four spans of text in one cache, each moved to its end by a different number of positions."""
    dtype, elements = default_dtype(device), tokens * kv_heads * HEAD_DIM

    def calls(draw: Draw, copies: int) -> Iterable[Call]:
        blocks = 2 * copies * -(-tokens // BLOCK) + 1
        key, value = (draw(blocks, BLOCK, kv_heads, HEAD_DIM).to(dtype) for _ in range(2))
        deltas = torch.tensor([777, -1200, 3, 40], device=device).repeat_interleave(tokens // 4)
        for i in range(copies):
            source, target = (torch.arange(tokens, device=device) + 5 + k * tokens for k in (2 * i, 2 * i + 1))
            names = {"source_slots": source, "target_slots": target, "deltas": deltas}
            yield Call(key_cache=key, value_cache=value, **names, inv_freq=_frequencies(device))

    def reference(call: Call) -> Iterable[Expected]:
        keys, values = (cache.flatten(0, 1) for cache in (call.key_cache, call.value_cache))
        exact, moved = _turned(keys[call.source_slots].double(), call), values[call.source_slots]
        keys[call.target_slots], values[call.target_slots] = 0, 0
        yield Expected(exact, lambda got: keys[call.target_slots], roundings(exact, dtype))
        yield Expected(moved, lambda got: values[call.target_slots])

    return Inputs(calls, reference, 4 * elements * dtype.itemsize + 24 * tokens, 3 * elements, device, rotate)


def _turned(keys: torch.Tensor, call: Call) -> torch.Tensor:
    """Return keys `[n, ..., head_dim]` moved by `[n]` positions, in their own dtype."""
    angles = call.deltas.double().view(-1, *[1] * (keys.ndim - 1)) * call.inv_freq.double()
    return _rotated(keys, *(part.to(keys.dtype) for part in (angles.cos(), angles.sin())))


def _move_in_torch(call: Call) -> None:
    keys, values = (cache.flatten(0, 1) for cache in (call.key_cache, call.value_cache))
    turned = _turned(keys.index_select(0, call.source_slots).float(), call)
    keys.index_copy_(0, call.target_slots, turned.to(keys.dtype))
    values.index_copy_(0, call.target_slots, values.index_select(0, call.source_slots))


def _move_case(device: str, tokens: int, quick: bool):  # type: ignore[no-untyped-def]
    columns = {"count": tokens, "heads": 8, "head_dim": HEAD_DIM, "block_size": BLOCK}
    return case(f"{tokens} tokens, KV 8x128", device, quick, move_inputs, tokens, 8, **columns)


BENCHMARKS = (
    Benchmark(
        "reshape_and_cache",
        (
            _write_case("cpu", 8, 8, 128, quick=True),
            _write_case("cpu", 1024, 8, 128, quick=True),
            _write_case("cpu", 1024, 8, 128, "int8"),
            *(_write_case("cuda", tokens, 8, 128, quick=tokens == 2048) for tokens in (1, 8, 128, 2048, 16384)),
            _write_case("cuda", 2048, 4, 64),
            _write_case("cuda", 2048, 8, 128, "float8_e4m3fn"),
            _write_case("cuda", 2048, 8, 128, "int8"),
        ),
        (
            ours("reshape_and_cache"),
            in_torch("torch indexing", _write_by_indexing),
            Provider("vLLM reshape_and_cache", _vllm_write, vllm_version, "cuda"),
        ),
    ),
    Benchmark(
        "rope_and_cache",
        (
            *(_rope_case("cpu", tokens, True) for tokens in (8, 1024)),
            *(_rope_case("cuda", tokens, tokens in (8, 2048)) for tokens in (1, 8, 128, 2048, 16384)),
        ),
        (ours("rope_and_cache"), in_torch("torch", _rope_in_torch)),
    ),
    Benchmark(
        "move_slots",
        (
            *(_move_case("cpu", count, True) for count in (64, 4096)),
            *(_move_case("cuda", count, count == 4096) for count in (64, 1024, 4096, 32768)),
        ),
        (ours("move_slots"), in_torch("torch", _move_in_torch)),
    ),
)
