"""pc.move_slots: complex multiplication in float64, values bit for bit, and what a rotary embedding would write."""

from __future__ import annotations

import pytest
import torch

import pc

F16, BF16, F32, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
SOURCES, TARGETS, DELTAS = (0, 13, -1, 3, 39, 13), (25, 31, 27, -1, 21, 38), (3, -100, 9, 4, 2, 131_000)


def _inv_freq(rotary_dim, device="cpu"):
    return 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)


def _moves(device="cpu"):
    return tuple(torch.tensor(x, device=device) for x in (SOURCES, TARGETS, DELTAS))


def _turned(keys, delta, inv_freq, is_neox, first):
    """Keys `[heads, head_dim]` in float64."""
    x, half = keys.cpu().double().clone(), len(inv_freq)
    turn = torch.polar(torch.ones(half, dtype=torch.float64), delta * inv_freq.cpu().double())
    pairs = x[..., first : first + 2 * half]
    a, b = (pairs[..., :half], pairs[..., half:]) if is_neox else (pairs[..., ::2], pairs[..., 1::2])
    turned = torch.complex(a, b) * turn
    parts = (turned.real, turned.imag)
    x[..., first : first + 2 * half] = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
    return x


def _check(caches, before, turn, tolerance):
    (keys, values), (old_keys, old_values) = ([x.cpu().flatten(0, 1) for x in pair] for pair in (caches, before))
    for source, target, delta in zip(SOURCES, TARGETS, DELTAS, strict=True):
        if target < 0:
            continue
        exact = turn(old_keys[source], delta) if source >= 0 else torch.zeros(keys.shape[1:])
        assert ((keys[target].double() - exact).abs() <= tolerance(exact)).all(), (source, target, delta)
        want = old_values[source] if source >= 0 else torch.zeros_like(old_values[0])
        assert torch.equal(values[target].view(torch.uint8), want.view(torch.uint8))
    rest = [slot for slot in range(len(keys)) if slot not in TARGETS]
    for new, old in ((keys, old_keys), (values, old_values)):
        assert torch.equal(new[rest].view(torch.uint8), old[rest].view(torch.uint8))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "first"), [(64, 64, 0), (80, 32, 0), (576, 64, 512), (16, 2, 3)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_numerics(dtype, head_dim, rotary_dim, first, is_neox, device):
    keys = torch.randn(8, 5, 3, head_dim, device=device).to(dtype)
    values, inv_freq = torch.randn(8, 5, 3, 24, device=device).to(dtype), _inv_freq(rotary_dim, device)
    before = keys.clone(), values.clone()
    torch.ops.pc.move_slots(keys, values, *_moves(device), inv_freq, is_neox, first)
    turn = lambda x, delta: _turned(x, delta, inv_freq, is_neox, first)  # noqa: E731
    _check((keys, values), before, turn, lambda exact: 2 * torch.finfo(dtype).eps * (exact.abs() + 1))


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_codes_are_turned_and_rounded_once(dtype, device):
    keys, values = torch.randn(2, 8, 5, 3, 48) * (20 if dtype == INT8 else 1)
    keys, values = ((x.round().clamp(-128, 127) if dtype == INT8 else x).to(dtype).to(device) for x in (keys, values))
    before, inv_freq = (keys.clone(), values.clone()), _inv_freq(32, device)
    pc.move_slots(keys, values, *_moves(device), inv_freq)
    ulp = (lambda x: torch.full_like(x, 0.51)) if dtype == INT8 else (lambda x: x.abs() / 15 + 2**-9)
    turn = lambda x, delta: _turned(x.float(), delta, inv_freq, True, 0)  # noqa: E731
    _check((keys, values), before, turn, ulp)


@pytest.mark.parametrize("dtype", [F16, INT8])
def test_without_rotary_positions_all_is_copied(dtype, device):
    keys, values = (torch.randn(2, 8, 5, 3, 24, device=device) * 30).to(dtype)
    before = keys.clone(), values.clone()
    pc.move_slots(keys, values, *_moves(device))
    _check((keys, values), before, lambda x, delta: x.double(), lambda exact: 0)


@pytest.mark.parametrize("layout", ["head_major", "padded_features", "padded_blocks", "offset"])
def test_layouts(layout, strided, device):
    keys, values = (strided(layout, (8, 5, 3, 8), F32) for _ in range(2))
    for cache in (keys, values):
        cache.copy_(torch.randn(8, 5, 3, 8))
    before, inv_freq = (keys.clone(), values.clone()), _inv_freq(8, device)
    pc.move_slots(keys, values, *_moves(device), inv_freq)
    turn = lambda x, delta: _turned(x, delta, inv_freq, True, 0)  # noqa: E731
    _check((keys, values), before, turn, lambda exact: 1e-5 * (exact.abs() + 1))


def test_latent_rows_have_no_values_and_nothing_may_be_moved(device):
    rows, inv_freq = torch.randn(8, 5, 1, 24, device=device), _inv_freq(8, device)
    before, none = rows.clone(), torch.empty(0, dtype=torch.int64, device=device)
    pc.move_slots(rows, None, none, none, none, inv_freq, first=16)
    assert torch.equal(rows, before)
    pc.move_slots(rows, None, *_moves(device), inv_freq, first=16)
    assert torch.equal(rows.flatten(0, 1)[25, :, :16], before.flatten(0, 1)[0, :, :16])


def test_it_is_what_a_rotary_embedding_would_have_written(device):
    inv_freq = _inv_freq(64, device)
    angles = torch.arange(4096, device=device).double()[:, None] * inv_freq
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float()
    key, query = torch.randn(2, 32, 2, 64, device=device).unbind()
    keys, values = torch.zeros(2, 2, 4, 16, 2, 64, device=device).unbind()
    for number, (first, slot) in enumerate(((7, 3), (3007, 29))):
        positions, slots = torch.arange(first, first + 32, device=device), torch.arange(slot, slot + 32, device=device)
        pc.rope_and_cache(query, key, key, positions, cos_sin, keys[number], values[number], slots)
    slots = torch.arange(3, 15, device=device)
    pc.move_slots(keys[0], values[0], slots, slots + 40, torch.full((12,), 3000, device=device), inv_freq)
    torch.testing.assert_close(keys[0].flatten(0, 1)[43:55], keys[1].flatten(0, 1)[29:41], atol=1e-5, rtol=1e-5)
    assert torch.equal(values[0].flatten(0, 1)[43:55], values[1].flatten(0, 1)[29:41])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key_cache": torch.zeros(8, 5, 16, 2).transpose(2, 3)}, ValueError, "key_cache: got strides"),
        ({"key_cache": torch.zeros(8, 5, 2, 16).double()}, TypeError, "key_cache: got float64"),
        ({"value_cache": torch.zeros(8, 5, 3, 16)}, ValueError, r"value_cache: got shape \[8, 5, 3, 16\], needs"),
        (
            {"source_slots": torch.tensor(SOURCES) + 5},
            ValueError,
            "source_slots: got values from 4 to 44, needs -1 to 39",
        ),
        ({"target_slots": torch.tensor(TARGETS)[:3]}, ValueError, "target_slots: got 3 elements, needs 6"),
        ({"deltas": torch.zeros(6)}, TypeError, "deltas: got float32"),
        ({"inv_freq": torch.ones(9)}, ValueError, r"inv_freq: .*needs 1 to 8 elements"),
        ({"first": 3}, ValueError, r"inv_freq: .*needs 1 to 6 elements"),
        ({"first": 17}, ValueError, "first: got 17, needs 0 to 16"),
        ({"first": -1}, ValueError, "first: got -1, needs 0 to 16"),
    ],
)
def test_bad_arguments_change_nothing(change, error, message):
    keys, values = torch.randn(2, 8, 5, 2, 16)
    sources, targets, deltas = _moves()
    given = {
        "key_cache": keys,
        "value_cache": values,
        "source_slots": sources,
        "target_slots": targets,
        "deltas": deltas,
    }
    before = keys.clone(), values.clone()
    with pytest.raises(error, match=message):
        pc.move_slots(**{**given, "inv_freq": _inv_freq(16), **change})
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
