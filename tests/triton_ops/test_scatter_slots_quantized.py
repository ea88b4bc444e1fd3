from __future__ import annotations

import pytest
import torch

import pc
from pc.triton_ops.scatter_slots_quantized import scatter_slots_quantized_cpu

CODES = (torch.float8_e4m3fn, torch.int8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

SLOTS = (0, 5, -1, 7, 8, 9, 10, 11, 3)


def rows(features, dtype):
    """Rows of many magnitudes, of zeros, with NaN, with infinity, of numbers near the smallest normal one."""
    magnitudes = torch.tensor([1, 10, 1, 0, 1, 1, 1e-4, 1e-36, 1e4])
    values = torch.randn(9, *features) * magnitudes.view(-1, *[1] * len(features))
    values[values.abs() < 2e-38] = 0.0  # triton's interpreter misreads subnormal bfloat16
    values[4].view(-1)[0], values[5].view(-1)[-1] = float("nan"), float("-inf")
    return values.to(dtype)


def empty_cache(features, codes, device):
    return torch.zeros(4, 4, *features, dtype=codes, device=device), torch.zeros(4, 4, device=device)


@pytest.mark.parametrize("features", [(), (1,), (7,), (3, 5), (2049,), (5000,)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_codes_and_scales_bit_for_bit(codes, dtype, features, same_bits, device):
    source, slots = rows(features, dtype), torch.tensor(SLOTS)
    expected = empty_cache(features, codes, "cpu")
    scatter_slots_quantized_cpu(source, *expected, slots)
    got = empty_cache(features, codes, device)
    torch.ops.pc.scatter_slots_quantized(source.to(device), *got, slots.to(device))
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1].nan_to_num(-1.0), expected[1].nan_to_num(-1.0))


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_error_is_at_most_half_a_step(codes, device):
    source = torch.randn(64, 300, device=device) * torch.logspace(-6, 6, 64, device=device)[:, None]
    cache, scales = empty_cache((300,), codes, device)
    cache, scales = cache.repeat(4, 1, 1), scales.repeat(4, 1)
    slots = torch.randperm(64).to(device)
    pc.scatter_slots_quantized(source, cache, scales, slots)
    stored = cache.view(64, 300)[slots].double() * scales.view(64)[slots].double()[:, None]
    peak = source.double().abs().amax(1, keepdim=True)
    bound = peak / 254 if codes == torch.int8 else torch.maximum(source.double().abs() / 16, peak / 448 / 1024)
    assert bool(((stored - source).abs() <= bound * (1 + 1e-6)).all())


def test_zeros_stay_zero_and_bad_rows_read_as_nan(device):
    source, slots = rows((7,), torch.float32).to(device), torch.tensor(SLOTS, device=device)
    for codes in CODES:
        cache, scales = empty_cache((7,), codes, device)
        pc.scatter_slots_quantized(source, cache, scales, slots)
        read = cache.view(16, 7).float() * scales.view(16, 1)
        assert not bool(read[7].any())
        assert bool(read[[8, 9]].isnan().all())
        assert bool(read[[0, 5, 10, 11, 3]].isfinite().all())
        assert not bool(scales.view(16)[[1, 2, 4, 6, 12, 13, 14, 15]].any())


@pytest.mark.parametrize("features", [(3, 5), (7,)], ids=str)
def test_strided_cache_and_source(features, same_bits, device):
    """A row that is turned is copied first, and one of a single dimension even where it is no copy to flatten it."""
    source, slots = rows(features, torch.bfloat16), torch.tensor(SLOTS)
    expected = empty_cache(features, torch.int8, "cpu")
    scatter_slots_quantized_cpu(source, *expected, slots)
    cache = torch.zeros(4, 5, *features, dtype=torch.int8, device=device)[:, :4]
    scales = torch.zeros(4, 8, device=device)[:, ::2]
    wide = source.mT.contiguous().mT if len(features) == 1 else source.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    pc.scatter_slots_quantized(wide.to(device), cache, scales, slots.to(device))
    assert same_bits(cache, expected[0])
    assert same_bits(scales.nan_to_num(-1.0), expected[1].nan_to_num(-1.0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: {"cache": a["cache"].float()}, TypeError, "cache: .*float8_e4m3fn or int8"),
        (lambda a: {"cache": a["cache"].transpose(2, 3)}, ValueError, "cache: .*contiguous features"),
        (lambda a: {"scales": a["scales"].double()}, TypeError, "scales: got float64"),
        (lambda a: {"scales": a["scales"][:3]}, ValueError, r"scales: got shape \[3, 4\], needs \[4, 4\]"),
        (lambda a: {"source": a["source"].int()}, TypeError, "source: .*float16 or bfloat16 or float32"),
        (lambda a: {"source": a["source"][:1]}, ValueError, "source: got float32"),
        (lambda a: {"slot_mapping": a["slot_mapping"] + 15}, ValueError, "slot_mapping: got values from 15 to 16"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(change, error, message):
    cache, scales = empty_cache((2, 3), torch.int8, "cpu")
    arguments = {
        "source": torch.ones(2, 2, 3),
        "cache": cache,
        "scales": scales,
        "slot_mapping": torch.tensor([0, 1]),
    }
    with pytest.raises(error, match=message):
        pc.scatter_slots_quantized(**{**arguments, **change(arguments)})
    assert not bool(cache.any())
    assert not bool(scales.any())


@pytest.mark.gpu
def test_pinned_cache(same_bits):
    source, slots = rows((64,), torch.bfloat16), torch.tensor(SLOTS)
    want, got = empty_cache((64,), torch.int8, "cpu"), [t.pin_memory() for t in empty_cache((64,), torch.int8, "cpu")]
    scatter_slots_quantized_cpu(source, *want, slots)
    pc.scatter_slots_quantized(source.cuda(), *got, slots.cuda())
    torch.cuda.synchronize()
    assert same_bits(got[0], want[0])
