"""pc.rotate_keys: complex multiplication in float64, and keys that a rotary embedding would have put there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pc

F16, BF16, F32, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
SOURCES, TARGETS, DELTAS = (0, 2, -1, 3, -1, 2), (5, 6, 7, -1, -1, 1), (3, -100, 9, 4, 2, 131_000)


def _inv_freq(rotary_dim, device="cpu"):
    return 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)


def _moves(device="cpu"):
    ids = (torch.tensor(SOURCES, device=device), torch.tensor(TARGETS, device=device))
    return *ids, torch.tensor(DELTAS, dtype=torch.int32, device=device)


def _turned(keys, delta, inv_freq, is_neox):
    """Keys `[..., head_dim]` in float64."""
    turn = torch.polar(torch.ones(len(inv_freq), dtype=torch.float64), delta * inv_freq.cpu().double())
    x, half = keys.cpu().double(), len(inv_freq)
    pairs = x[..., : 2 * half]
    a, b = (pairs[..., :half], pairs[..., half:]) if is_neox else (pairs[..., ::2], pairs[..., 1::2])
    turned = torch.complex(a, b) * turn
    parts = (turned.real, turned.imag)
    joined = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
    return torch.cat([joined, x[..., 2 * half :]], -1)


def _check(cache, before, inv_freq, is_neox, tolerance):
    cache, before = cache.cpu(), before.cpu()
    written = set()
    for source, target, delta in zip(SOURCES, TARGETS, DELTAS, strict=True):
        if target < 0:
            continue
        written.add(target)
        exact = _turned(before[source], delta, inv_freq, is_neox) if source >= 0 else torch.zeros(before.shape[1:])
        assert ((cache[target].double() - exact).abs() <= tolerance(exact)).all(), (source, target, delta)
    for block in set(range(len(cache))) - written:
        assert torch.equal(cache[block].view(torch.uint8), before[block].view(torch.uint8))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 96), (256, 256), (512, 128), (16, 2)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_numerics(dtype, head_dim, rotary_dim, is_neox, device):
    cache = torch.randn(8, 5, 3, head_dim, device=device).to(dtype)
    before, inv_freq = cache.clone(), _inv_freq(rotary_dim, device)
    torch.ops.pc.rotate_keys(cache, *_moves(device), inv_freq, is_neox)
    # In triton's interpreter a conversion to bfloat16 cuts bits off where a device rounds.
    _check(cache, before, inv_freq, is_neox, lambda exact: 2 * torch.finfo(dtype).eps * (exact.abs() + 1))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16, E4M3])
def test_pairs_behind_columns_that_are_copied(dtype, is_neox, device):
    """Latent rows, `[num_blocks, block_size, 1, 512 + 64]` in DeepSeek's models: the last columns alone turn."""
    cache = torch.randn(8, 5, 1, 80).to(dtype).to(device)
    before, inv_freq = cache.clone(), _inv_freq(16, device)
    pc.rotate_keys(cache, *_moves(device), inv_freq, is_neox, first=48)
    whole, moved = before[..., 48:].contiguous(), cache[..., 48:].contiguous()
    ulp = (lambda x: x.abs() / 15 + 2**-9) if dtype == E4M3 else (lambda x: 2 * torch.finfo(dtype).eps * (x.abs() + 1))
    _check(moved.float(), whole.float(), inv_freq, is_neox, ulp)
    for source, target in zip(SOURCES, TARGETS, strict=True):
        if target >= 0:
            kept = before[source, ..., :48] if source >= 0 else torch.zeros_like(before[0, ..., :48])
            assert torch.equal(cache[target, ..., :48].view(torch.uint8), kept.view(torch.uint8))


def test_pairs_that_are_not_there_are_refused():
    cache, moves = torch.zeros(8, 5, 1, 80), _moves()
    with pytest.raises(ValueError, match="first: got 79, needs 0 to 78"):
        pc.rotate_keys(cache, *moves, _inv_freq(2), first=79)
    with pytest.raises(
        ValueError, match=r"inv_freq: got .* needs 1 to 16 elements, one per pair of head_dim from 48 on"
    ):
        pc.rotate_keys(cache, *moves, _inv_freq(34), first=48)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_codes_are_turned_and_rounded_once(dtype, is_neox, device):
    keys = torch.randn(8, 5, 3, 48) * (20 if dtype == INT8 else 1)
    cache = (keys.round().clamp(-128, 127) if dtype == INT8 else keys).to(dtype).to(device)
    before, inv_freq = cache.clone(), _inv_freq(32, device)
    pc.rotate_keys(cache, *_moves(device), inv_freq, is_neox)
    ulp = (lambda x: torch.full_like(x, 0.51)) if dtype == INT8 else (lambda x: x.abs() / 15 + 2**-9)
    _check(cache.float(), before.float(), inv_freq, is_neox, ulp)
    assert torch.equal(cache[6, ..., 32:].view(torch.uint8), before[2, ..., 32:].view(torch.uint8))


def test_what_leaves_the_range_saturates(device):
    cache = torch.full((2, 1, 1, 2), 127, dtype=INT8, device=device)
    eighth = torch.tensor([torch.pi / 4], device=device)
    one = torch.tensor([1], device=device)
    pc.rotate_keys(cache, one - 1, one, one.int(), eighth)
    assert cache[1].flatten().tolist() == [0, 127]  # 127 * sqrt(2) has no code


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_what_a_rotary_embedding_would_have_written(interleaved, device):
    inv_freq = _inv_freq(64, device)
    angles = torch.arange(4096, device=device).double()[:, None] * inv_freq
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float()
    key, query = torch.randn(2, 32, 2, 64, device=device).unbind()
    caches = torch.zeros(2, 4, 16, 2, 64, device=device)
    slots = torch.arange(32, device=device)
    for cache, first in ((caches[0], 7), (caches[1], 3007)):
        positions = torch.arange(first, first + 32, device=device)
        pc.rope_and_cache(query, key, key, positions, cos_sin, cache, cache.clone(), slots, interleaved)
    ids = torch.tensor([0, 1], device=device)
    pc.rotate_keys(caches[0], ids, ids + 2, torch.full((2,), 3000, dtype=torch.int32), inv_freq, not interleaved)
    torch.testing.assert_close(caches[0, 2:], caches[1, :2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_neox", [True, False])
def test_in_place_and_back(is_neox, device):
    cache = torch.randn(4, 16, 2, 64, device=device)
    before, ids, inv_freq = cache.clone(), torch.arange(4, device=device), _inv_freq(64, device)
    deltas = torch.tensor([5, -1, 0, 4000], dtype=torch.int32, device=device)
    pc.rotate_keys(cache, ids, ids, deltas, inv_freq, is_neox)
    assert not torch.equal(cache[0], before[0])
    assert torch.equal(cache[2], before[2])
    pc.rotate_keys(cache, ids, ids, -deltas, inv_freq, is_neox)
    torch.testing.assert_close(cache, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["head_major", "padded_features", "padded_blocks", "offset"])
def test_layouts(layout, strided, device):
    cache = strided(layout, (8, 4, 3, 8), F32)
    cache.copy_(torch.randn(8, 4, 3, 8))
    before, inv_freq = cache.clone(), _inv_freq(8, device)
    pc.rotate_keys(cache, *_moves(device), inv_freq)
    _check(cache.contiguous(), before.contiguous(), inv_freq, True, lambda exact: 1e-5 * (exact.abs() + 1))


def test_nan_stays_where_it_is_read(device):
    cache = torch.randn(8, 4, 2, 16, device=device)
    cache[4] = float("nan")
    pc.rotate_keys(cache, *_moves(device), _inv_freq(16, device))
    assert not cache[[0, 1, 2, 3, 5, 6, 7]].isnan().any()


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31(device):
    shape = (2051, 16, 128, 512)
    if device.type == "cuda":
        cache = torch.zeros(shape, dtype=INT8, device=device)
    else:  # pages that nobody touches cost nothing
        cache = torch.from_numpy(np.zeros(shape, np.int8))
    cache[2050, ..., 0] = 100
    quarter = torch.tensor([torch.pi / 2], device=device)
    pc.rotate_keys(cache, *(torch.tensor([i], device=device) for i in (2050, 2048, 1)), quarter)
    assert bool((cache[2048, ..., 1] == 100).all())
    assert not bool(cache[2048, ..., 0].any() | cache[2047].any() | cache[2049].any())


def test_nothing_to_move(device):
    cache, none = torch.ones(4, 4, 1, 8, device=device), torch.empty(0, dtype=torch.int64, device=device)
    pc.rotate_keys(cache, none, none, none, _inv_freq(8, device))
    assert bool((cache == 1).all())


@pytest.mark.parametrize(
    ("index", "change", "error", "message"),
    [
        (0, lambda x: x.transpose(2, 3), ValueError, "key_cache: got strides"),
        (0, lambda x: x.double(), TypeError, "key_cache: got float64"),
        (1, lambda x: x + 5, ValueError, "source_ids: got values from 4 to 8, needs -1 to 7"),
        (2, lambda x: x[:3], ValueError, "target_ids: got 3 elements, needs 6"),
        (2, lambda x: x - 2, ValueError, "target_ids: got values from -3"),
        (3, lambda x: x.float(), TypeError, "deltas: got float32"),
        (3, lambda x: x[:, None], ValueError, r"deltas: got shape \[6, 1\]"),
        (4, lambda x: torch.ones(9), ValueError, r"inv_freq: .*needs 1 to 8 elements"),
        (4, lambda x: x[:0], ValueError, r"inv_freq: .*needs 1 to 8 elements"),
        (4, lambda x: x.tolist(), TypeError, "inv_freq: got list, needs a tensor"),
    ],
)
def test_bad_arguments_change_nothing(index, change, error, message):
    arguments = [torch.randn(8, 4, 2, 16), *_moves(), _inv_freq(16)]
    arguments[index] = change(arguments[index])
    before = arguments[0].clone()
    with pytest.raises(error, match=message):
        pc.rotate_keys(*arguments)
    assert torch.equal(arguments[0], before)


@pytest.mark.gpu
def test_ids_from_the_host(device):
    cache, inv_freq = torch.randn(8, 4, 2, 16, device=device), _inv_freq(16, device)
    expected = cache.clone()
    pc.rotate_keys(expected, *_moves(device), inv_freq)
    pc.rotate_keys(cache, *_moves("cpu"), inv_freq)
    assert torch.equal(cache, expected)
