"""pc.rope_and_cache: the rotation in float64, and the cache of a rotation followed by a write."""

from __future__ import annotations

import pytest
import torch
from refusals import check_refused
from row_cases import check_rope

import pc

F16, BF16, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8


def _inputs(dtype, head_dim=64, rotary_dim=64, tokens=9, heads=(6, 2), cache_dtype=None, device="cpu"):
    query, key, value = (torch.randn(tokens, n, head_dim).to(dtype) for n in (heads[0], heads[1], heads[1]))
    angles = torch.arange(50)[:, None] / 10000 ** (torch.arange(rotary_dim // 2) * 2 / rotary_dim)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    caches = [torch.zeros(5, 8, heads[1], head_dim).to(cache_dtype or dtype) for _ in range(2)]
    slots = torch.randperm(40)[:tokens]
    slots[2:3] = -1
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    return [t.to(device) for t in (query, key, value, positions, cos_sin, *caches, slots)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 96), (256, 256), (16, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, F16, BF16])
def test_numerics(dtype, head_dim, rotary_dim, interleaved, device):
    check_rope(*_inputs(dtype, head_dim, rotary_dim, device=device), interleaved)


@pytest.mark.parametrize("cache_dtype", [E4M3, INT8])
def test_quantized_cache_is_that_of_two_ops(cache_dtype, device):
    scales = torch.tensor([0.02, 0.03], device=device), torch.tensor(0.05, device=device)
    inputs = _inputs(torch.float32, cache_dtype=cache_dtype, device=device)
    query, key, value, positions, cos_sin, key_cache, value_cache, slots = inputs
    pc.rope_and_cache(*inputs, False, *scales)
    plain = _inputs(torch.float32, device=device)[5:7]
    pc.rope_and_cache(query, key, value, positions, cos_sin, *plain, slots)
    expected = [torch.zeros_like(cache) for cache in (key_cache, value_cache)]
    rows = torch.where(slots < 0, 0, slots)
    pc.reshape_and_cache(plain[0].flatten(0, 1)[rows], value, *expected, slots, *scales)
    for cache, other in zip((key_cache, value_cache), expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


def test_strided_inputs(device):
    inputs = _inputs(torch.float32, device=device)
    query, key, value, *rest = inputs
    expected = pc.rope_and_cache(*inputs)
    packed = torch.cat([query, key, value], 1)
    split = packed.split([6, 2, 2], 1)
    assert torch.equal(pc.rope_and_cache(*split, *rest), expected)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[:, :, :32], "query: got shape"),
        ("positions", lambda x: x.float(), "positions: got float32"),
        ("positions", lambda x: x + 50, "positions: got values from"),
        ("cos_sin", lambda x: x[:, :63].contiguous(), "cos_sin: got .*an even rotary_dim of at most 64"),
        ("slot_mapping", lambda x: x + 40, "slot_mapping: got values"),
        ("key", lambda x: x.half(), "value: got float32"),
    ],
)
def test_bad_arguments(name, change, message):
    names = ("query", "key", "value", "positions", "cos_sin", "key_cache", "value_cache", "slot_mapping")
    check_refused(pc.rope_and_cache, dict(zip(names, _inputs(torch.float32), strict=True)), {name: change}, message)
