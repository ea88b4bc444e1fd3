"""pc.rotate_keys by block and pc.move_slots by slot: complex multiplication in float64, values bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import check_refused
from row_cases import check_rotation

import pc

F16, BF16, F32, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
INDEX = {
    "rotate_keys": ((0, 2, -1, 3, -1, 2), (5, 6, 7, -1, -1, 1)),
    "move_slots": ((0, 13, -1, 3, 39, 13), (25, 31, 27, -1, 21, 38)),
}
DELTAS = (3, -100, 9, 4, 2, 131_000)
each = pytest.mark.parametrize("op", INDEX)


def _inv_freq(rotary_dim, device="cpu"):
    return 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)


def _moves(op, device="cpu"):
    return [torch.tensor(numbers, device=device) for numbers in (*INDEX[op], DELTAS)]


def _run(op, keys, moves, *turn, values: Any = None, **options):
    if op == "rotate_keys":
        pc.rotate_keys(keys, *moves, *turn, **options)
    else:
        pc.move_slots(keys, values, *moves, *turn, **options)


def _rows(op, cache):
    """Return the rows that an index counts."""
    return cache if op == "rotate_keys" else cache.flatten(0, 1)


def _check(op, keys, inv_freq, is_neox=True, first=0):
    values = torch.randn(*keys.shape[:3], 24, device=keys.device).to(keys.dtype)
    check_rotation(op, keys, _moves(op, keys.device), inv_freq, is_neox, first, values)


@each
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "first"),
    [(64, 64, 0), (80, 32, 0), (128, 96, 0), (256, 256, 0), (512, 128, 0), (16, 2, 0), (576, 64, 512), (16, 2, 3)],
)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_numerics(op, dtype, head_dim, rotary_dim, first, is_neox, device):
    keys = torch.randn(8, 5, 3, head_dim, device=device).to(dtype)
    _check(op, keys, _inv_freq(rotary_dim, device), is_neox, first)


@each
@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_codes_are_turned_and_rounded_once(op, dtype, is_neox, first, device):
    keys = torch.randn(8, 5, 3, 48) * (20 if dtype == INT8 else 1)
    keys = (keys.round().clamp(-128, 127) if dtype == INT8 else keys).to(dtype).to(device)
    _check(op, keys, _inv_freq(32, device), is_neox, first)


@each
def test_what_leaves_the_range_saturates(op, device):
    cache, one = torch.full((2, 1, 1, 2), 127, dtype=INT8, device=device), torch.tensor([1], device=device)
    _run(op, cache, (one - 1, one, one), torch.tensor([torch.pi / 4], device=device))
    assert cache[1].flatten().tolist() == [0, 127]  # 127 * sqrt(2) exceeds int8


@each
@pytest.mark.parametrize("layout", ["head_major", "padded_features", "padded_blocks", "offset"])
def test_layouts(op, layout, strided, device):
    keys = strided(layout, (8, 5, 3, 8), F32)
    keys.copy_(torch.randn(8, 5, 3, 8))
    _check(op, keys, _inv_freq(8, device))


@pytest.mark.parametrize("dtype", [F16, INT8])
def test_without_rotary_positions_all_is_copied(dtype, device):
    keys, values = ((torch.randn(8, 5, 3, 24, device=device) * 30).to(dtype) for _ in range(2))
    check_rotation("move_slots", keys, _moves("move_slots", device), None, values=values)


@each
@pytest.mark.parametrize("is_neox", [True, False])
def test_in_place_and_back(op, is_neox, device):
    cache = torch.randn(4, 16, 2, 64, device=device)
    count = len(_rows(op, cache))
    before, ids, inv_freq = cache.clone(), torch.arange(count, device=device), _inv_freq(64, device)
    deltas = torch.tensor([5, -1, 0, 4000], dtype=torch.int32, device=device).repeat(count // 4)
    _run(op, cache, (ids, ids, deltas), inv_freq, is_neox)
    assert not torch.equal(_rows(op, cache)[0], _rows(op, before)[0])
    assert torch.equal(_rows(op, cache)[2], _rows(op, before)[2])
    _run(op, cache, (ids, ids, -deltas), inv_freq, is_neox)
    torch.testing.assert_close(cache, before, atol=1e-5, rtol=1e-5)


@each
@pytest.mark.quick
def test_nan_stays_where_it_is_read_and_nothing_may_be_moved(op, device):
    cache, inv_freq = torch.randn(8, 5, 2, 16, device=device), _inv_freq(16, device)
    cache[4] = float("nan")
    _run(op, cache, [number[:3] for number in _moves(op, device)], inv_freq)
    assert not cache[[0, 1, 2, 3, 5, 6, 7]].isnan().any()
    before, none = cache.nan_to_num().clone(), torch.empty(0, dtype=torch.int64, device=device)
    _run(op, cache, (none, none, none), inv_freq)
    assert torch.equal(cache.nan_to_num(), before)


@each
@pytest.mark.slow
def test_offsets_beyond_two_to_the_31(op, device):
    shape = (2051, 16, 128, 512)
    if device.type == "cuda":
        cache = torch.zeros(shape, dtype=INT8, device=device)
    else:  # untouched pages need no memory
        cache = torch.from_numpy(np.zeros(shape, np.int8))
    rows, quarter = _rows(op, cache), torch.tensor([torch.pi / 2], device=device)
    source, target = (2050, 2048) if op == "rotate_keys" else (2050 * 16 + 3, 2048 * 16 + 5)
    rows[source, ..., 0] = 100
    _run(op, cache, [torch.tensor([i], device=device) for i in (source, target, 1)], quarter)
    assert bool((rows[target, ..., 1] == 100).all())
    assert not bool(rows[target, ..., 0].any() | rows[target - 1].any() | rows[target + 1].any())


REFUSED = [
    ("key_cache", lambda x: x.transpose(2, 3), "key_cache: got strides"),
    ("key_cache", lambda x: x.double(), "key_cache: got float64"),
    ("source", lambda x: x.clamp(min=0) + 50, "source_(ids|slots): got values from 50 to .*, needs -1 to"),
    ("target", lambda x: x[:3], "target_(ids|slots): got 3 elements, needs 6"),
    ("target", lambda x: x - 2, "target_(ids|slots): got values from -3"),
    ("deltas", lambda x: x.float(), "deltas: got float32"),
    ("deltas", lambda x: x[:, None], r"deltas: got shape \[6, 1\]"),
    ("inv_freq", lambda x: torch.ones(9), r"inv_freq: .*needs 1 to 8 elements"),
    ("inv_freq", lambda x: x[:0], r"inv_freq: .*needs 1 to 8 elements"),
    ("first", lambda x: 3, r"inv_freq: .*needs 1 to 6 elements"),
    ("first", lambda x: 17, "first: got 17, needs 0 to 1[46]"),
    ("first", lambda x: -1, "first: got -1, needs 0 to 1[46]"),
]


@each
@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_bad_arguments_change_nothing(op, name, change, message):
    names = [f"{which}_{'ids' if op == 'rotate_keys' else 'slots'}" for which in ("source", "target")]
    keys, values = torch.randn(2, 8, 5, 2, 16)
    given = dict(zip((*names, "deltas"), _moves(op), strict=True))
    given |= {"key_cache": keys, "inv_freq": _inv_freq(16), "is_neox": True, "first": 0}
    given |= {"value_cache": values} if op == "move_slots" else {}
    (wrong,) = [each for each in given if each.startswith(name)]
    check_refused(getattr(pc, op), given, {wrong: change}, message)


def test_a_list_for_a_tensor_and_values_of_other_heads_are_refused():
    keys, moves = torch.randn(8, 5, 2, 16), _moves("rotate_keys")
    with pytest.raises(TypeError, match="inv_freq: got list, needs a tensor"):
        pc.rotate_keys(keys, *moves, [1.0])
    with pytest.raises(ValueError, match=r"value_cache: got shape \[8, 5, 3, 16\], needs .* like key_cache"):
        pc.move_slots(keys, torch.zeros(8, 5, 3, 16), *_moves("move_slots"))


@each
@pytest.mark.gpu
def test_indices_from_the_host(op, device):
    cache, inv_freq = torch.randn(8, 5, 2, 16, device=device), _inv_freq(16, device)
    expected = cache.clone()
    _run(op, expected, _moves(op, device), inv_freq)
    _run(op, cache, _moves(op, "cpu"), inv_freq)
    assert torch.equal(cache, expected)
