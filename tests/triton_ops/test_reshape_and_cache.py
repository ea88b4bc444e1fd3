"""pc.reshape_and_cache: slots, strides and quantized codes, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from refusals import check_refused
from row_cases import check_write

import pc

F16, BF16, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8


def _codes_by_search(x, scale, dtype):
    """Return the nearest code of x / scale, ties to even, saturated, by comparing with every value of the type."""
    scaled = (x.float() / scale.float().view(-1, 1)).double()
    if dtype == INT8:
        values = torch.arange(-128, 128, dtype=torch.float64)
        codes = torch.arange(-128, 128).to(INT8)
        even = torch.arange(-128, 128) % 2 == 0
    else:
        bits = torch.arange(256, dtype=torch.uint8)
        values = bits.view(E4M3).double()
        keep = ~values.isnan() & (bits != 0x80)
        bits, values = bits[keep], values[keep]
        values, order = values.sort()
        codes, even = bits[order].view(E4M3), bits[order] % 2 == 0
    low = torch.searchsorted(values, scaled.clamp(values[0], values[-1]).contiguous(), right=True) - 1
    high = (low + 1).clamp(max=len(values) - 1)
    to_low, to_high = scaled - values[low], values[high] - scaled
    up = (to_high < to_low) | ((to_high == to_low) & even[high] & ~even[low])
    picked = torch.where(up & (scaled < values[-1]), high, low)
    return codes.view(torch.uint8)[picked].view(dtype)


def _bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, F16, BF16])
def test_writes_slots(dtype, head_dim, block_size, device):
    tokens, heads, blocks = 21, 3, 5
    key, value = torch.randn(2, tokens, heads, head_dim, device=device).to(dtype)
    caches = [torch.full((blocks, block_size, heads, head_dim), 7.0, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.randperm(blocks * block_size)[:tokens].to(device)
    slots[[2, 9]] = -1
    check_write((key, value), caches, slots)


@pytest.mark.parametrize("layout", ["head_major", "packed", "sliced_source"])
def test_strides(layout, device):
    key, value = torch.randn(2, 9, 4, 64, device=device)
    slots = torch.randperm(48)[:9].to(device)
    plain = [torch.zeros(6, 8, 4, 64, device=device) for _ in range(2)]
    pc.reshape_and_cache(key, value, *plain, slots)
    if layout == "head_major":
        caches = [torch.zeros(6, 4, 8, 64, device=device).transpose(1, 2) for _ in range(2)]
    elif layout == "packed":
        caches = list(torch.zeros(6, 8, 4, 128, device=device).split(64, 3))
    else:
        caches = [torch.zeros(6, 8, 4, 64, device=device) for _ in range(2)]
        projected = torch.cat([key, value, key], dim=1)
        key, value = projected[:, :4], projected[:, 4:8]
    every_other = torch.stack((slots, slots.flip(0)), 1)[:, 0]
    pc.reshape_and_cache(key, value, *caches, every_other)
    assert torch.equal(caches[0], plain[0])
    assert torch.equal(caches[1], plain[1])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("cache_dtype", [E4M3, INT8])
@pytest.mark.parametrize("dtype", [torch.float32, F16, BF16])
def test_quantized_codes(dtype, cache_dtype, per_head, device):
    """The inputs are every code, every midpoint between two codes, values far outside, and zeros of both signs."""
    head_dim, heads = 64, 2
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    values = values[~values.isnan()].sort()[0] if cache_dtype == E4M3 else torch.arange(-130, 130).double()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([1e4, -1e4, 0.0, -0.0, 448.0, 465.0])])
    points = torch.cat([points, torch.randn(1024 - len(points) % 1024, dtype=torch.float64) * 30])
    scale = torch.tensor([0.5, 0.25]) if per_head else torch.tensor([0.5])
    key = (points.float().view(-1, heads, head_dim) * scale.view(-1, 1)).to(dtype).to(device)
    tokens = key.shape[0]
    caches = [torch.zeros(tokens // 8 + 1, 8, heads, head_dim, device=device).to(cache_dtype) for _ in range(2)]
    slots = torch.randperm(caches[0].shape[0] * 8)[:tokens].to(device)
    pc.reshape_and_cache(key, -key, *caches, slots, scale.to(device), torch.tensor([0.3]).to(device))
    for source, cache, own in ((key, caches[0], scale), (-key, caches[1], torch.tensor([0.3]))):
        expected = _codes_by_search(source.cpu(), own, cache_dtype)
        found = _bits(cache.flatten(0, 1).cpu())[slots.cpu()]
        negative_zero = (found == 0x80) & (_bits(expected) == 0) if cache_dtype == E4M3 else found != found
        assert torch.equal(found.masked_fill(negative_zero, 0), _bits(expected))


def test_no_tokens(device):
    cache = torch.zeros(2, 8, 1, 16, device=device)
    key = torch.zeros(0, 1, 16, device=device)
    pc.reshape_and_cache(key, key, cache, cache.clone(), torch.zeros(0, dtype=torch.int64, device=device))
    assert not cache.any()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("key", lambda k: k[0], "key: got shape"),
        ("key", lambda k: k.double(), "key: got float64"),
        ("value", lambda v: v[:, :1], "value: got shape"),
        ("value", lambda v: v.half(), "value: got float16"),
        ("key_cache", lambda c: c[:, :, :1], r"key_cache: got shape .*, needs \[num_blocks, block_size, 2, "),
        ("key_cache", lambda c: c.half(), "key_cache: got float16"),
        ("value_cache", lambda c: c[:1], "value_cache: got shape"),
        ("slot_mapping", lambda s: s.int(), "slot_mapping: got int32"),
        ("slot_mapping", lambda s: s[:2], "slot_mapping: got 2 elements, needs 5"),
        ("slot_mapping", lambda s: s + 16, "slot_mapping: got values from 16 to 20, needs -1 to 15"),
        ("slot_mapping", lambda s: s - 2, "slot_mapping: got values from -2"),
    ],
)
def test_bad_arguments_change_nothing(name, change, message):
    key, cache = torch.randn(5, 2, 32), torch.zeros(2, 8, 2, 32)
    given = {"key": key, "value": key + 1, "key_cache": cache, "value_cache": cache.clone()}
    check_refused(pc.reshape_and_cache, {**given, "slot_mapping": torch.arange(5)}, {name: change}, message)


@pytest.mark.gpu
def test_large_cache_on_the_device(device):
    cache = torch.zeros(70_000, 256, 1, 128, dtype=F16, device=device)
    key = torch.randn(3, 1, 128, dtype=F16, device=device)
    slots = torch.tensor([70_000 * 256 - 1, 5, -1], device=device)
    pc.reshape_and_cache(key, key, cache, cache, slots)
    assert torch.equal(cache[-1, -1, 0], key[0, 0])


def _nan_inputs(device):
    """Return keys with NaN of either sign, with infinity, and with zeros that a scale of 0 makes NaN."""
    key = torch.randn(6, 2, 16, device=device)
    key[0, 0, 3], key[1, 1, 0], key[2, 0, :2] = math.nan, -math.nan, torch.tensor([math.inf, -math.inf])
    key[3, 1, 5:9] = 0.0
    negative = key[1, 1].view(torch.int32)
    negative[0] = -(2**22)  # 0xFFC00000: NaN with its sign bit
    return key, torch.tensor([0.5, 0.0], device=device)


@pytest.mark.parametrize(("cache_dtype", "code"), [(E4M3, 0x7F), (INT8, 0)])
@pytest.mark.parametrize("rotated", [False, True])
def test_nan_has_one_code_on_every_path(cache_dtype, code, rotated, device):
    """Formerly NaN became 448 or NaN in e4m3, and 0 or -128 in int8, depending on the path."""
    key, scale = _nan_inputs(device)
    cache = torch.zeros(2, 4, 2, 16, dtype=cache_dtype, device=device)
    values, slots = cache.clone(), torch.arange(6, device=device)
    if rotated:  # by the angle 0
        cos_sin = torch.tensor([[1.0] * 8 + [0.0] * 8], device=device).expand(6, 16).contiguous()
        cos_sin[2] = cos_sin[2].nan_to_num()
        pc.rope_and_cache(key, key, key, slots, cos_sin, cache, values, slots, k_scale=scale, v_scale=scale)
    else:
        pc.reshape_and_cache(key, key, cache, values, slots, scale, scale)
    nan = (key / scale.view(-1, 1)).isnan()
    assert nan.sum() == 6
    written = values.flatten(0, 1)[:6].view(torch.uint8)
    assert (written[nan] == code).all()
    assert torch.equal(_bits(values), _bits(cache)) or rotated  # infinity times sin 0 is NaN
    if cache_dtype == E4M3:
        assert torch.equal(values.flatten(0, 1)[:6].float().isnan(), nan)
    else:
        assert written.view(INT8)[2, 0, :2].tolist() == [127, -128]


@pytest.mark.parametrize("name", ["key", "value"])
def test_debug_mode_refuses_nan_that_int8_cannot_hold(name, device):
    key, value = torch.randn(2, 3, 2, 16, device=device)
    caches = [torch.full((2, 4, 2, 16), 7, dtype=INT8, device=device) for _ in range(2)]
    slots, one = torch.tensor([1, -1, 2], device=device), torch.ones(1, device=device)
    broken = {"key": key, "value": value}[name]
    broken[1, 0, 0] = math.nan  # not written: padding may hold anything
    pc.set_debug_mode(True)
    pc.reshape_and_cache(key, value, *caches, slots, one, one)
    before = [cache.clone() for cache in caches]
    broken[2, 1, 5] = math.nan
    for write in (
        lambda: pc.reshape_and_cache(key, value, *caches, slots, one, one),
        lambda: pc.rope_and_cache(
            key, key, value, slots.clamp(0), torch.ones(4, 16, device=device), *caches, slots, False, one, one
        ),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got NaN, needs numbers, since int8 has no NaN"):
            write()
    assert all(map(torch.equal, caches, before))
