from __future__ import annotations

import pytest
import torch

import pc
from pc.triton_ops._triton import INTERPRET

CODES = (torch.float8_e4m3fn, torch.int8)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rounded(values, dtype):
    """float32 values in `dtype`; triton's interpreter drops the bits that bfloat16 lacks instead of rounding."""
    if dtype == torch.bfloat16 and INTERPRET:
        return (values.view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return values.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_every_code(codes, dtype, device):
    cache = torch.arange(256, dtype=torch.uint8).view(codes).view(1, 1, 256)
    slot = torch.tensor([0], device=device)
    for scale in (1.0, 0.37, 3e-3):
        out = pc.gather_slots_dequantized(cache.to(device), torch.full((1, 1), scale, device=device), slot, dtype).cpu()
        expected = rounded(cache[0].float() * torch.tensor(scale), dtype)
        assert torch.equal(out.nan_to_num(777.0), expected.nan_to_num(777.0))
        assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize("features", [(), (7,), (3, 5), (5000,)], ids=str)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_rows_and_holes(codes, features, device):
    cache = torch.randint(-80, -1, (4, 4, *features), dtype=torch.int8).view(codes)
    scales, slots = torch.rand(4, 4), torch.tensor([3, -1, 15, 0, 3, -1])
    flat = cache.float().view(16, -1) * scales.view(16, 1)
    expected = torch.where(slots[:, None] < 0, 0.0, flat[slots.clamp(min=0)]).view(6, *features)
    out = pc.gather_slots_dequantized(cache.to(device), scales.to(device), slots.to(device), torch.float32)
    assert torch.equal(out.cpu(), expected)


def test_strided_cache(device):
    cache = torch.randint(-80, 80, (4, 5, 2, 3), dtype=torch.int8, device=device)[:, :4]
    scales = torch.rand(4, 8, device=device)[:, ::2]
    slots = torch.arange(16, device=device)
    out = pc.gather_slots_dequantized(cache, scales, slots, torch.float32)
    assert torch.equal(out, cache.float().reshape(16, 2, 3) * scales.reshape(16, 1, 1))


def test_nothing_to_gather(device):
    cache, scales = torch.zeros(4, 4, 5, dtype=torch.int8, device=device), torch.zeros(4, 4, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert pc.gather_slots_dequantized(cache, scales, empty, torch.float16).shape == (0, 5)
    holes = torch.full((2,), -1, device=device)
    out = pc.gather_slots_dequantized(cache[:0], scales[:0], holes, torch.float32)
    assert torch.equal(out, torch.zeros(2, 5, device=device))


def test_bad_arguments_are_named():
    cache, scales, slots = torch.zeros(4, 4, 5, dtype=torch.int8), torch.zeros(4, 4), torch.tensor([0])
    with pytest.raises(TypeError, match=r"dtype: got torch.float64, needs float16, bfloat16 or float32"):
        pc.gather_slots_dequantized(cache, scales, slots, torch.float64)
    with pytest.raises(TypeError, match=r"cache: .*float8_e4m3fn or int8"):
        pc.gather_slots_dequantized(cache.to(torch.uint8), scales, slots, torch.float32)
    with pytest.raises(ValueError, match="scales: got shape"):
        pc.gather_slots_dequantized(cache, scales.T[:3], slots, torch.float32)
    with pytest.raises(ValueError, match="slot_mapping: got values from 16 to 16, needs -1 to 15"):
        pc.gather_slots_dequantized(cache, scales, slots + 16, torch.float32)


@pytest.mark.gpu
def test_pinned_cache():
    cache, scales = torch.randint(-80, 80, (4, 4, 5), dtype=torch.int8), torch.rand(4, 4)
    slots = torch.tensor([3, -1, 5])
    expected = pc.gather_slots_dequantized(cache, scales, slots, torch.float32)
    out = pc.gather_slots_dequantized(cache.pin_memory(), scales.pin_memory(), slots.cuda(), torch.float32)
    assert torch.equal(out.cpu(), expected)
