from __future__ import annotations

import numpy as np
import pytest
import torch

import pc

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
SLOTS = (5, -1, 0, 23, 7, 7, 8, 9, 10, -1, -1, 22)


def oracle(cache, slots):
    rows = cache.cpu().reshape(-1, *cache.shape[2:])
    out = torch.zeros((len(slots), *cache.shape[2:]), dtype=cache.dtype)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            out[i] = rows[slot]
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype, random_bits, same_bits, device):
    cache = random_bits((6, 4, 3, 5), dtype)
    slots = torch.tensor(SLOTS, device=device)
    assert same_bits(torch.ops.pc.gather_slots(cache, slots), oracle(cache, slots))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_every_layout(layout, dtype, strided, same_bits, device):
    cache = strided(layout, (6, 4, 3, 8), dtype)
    slots = torch.tensor(SLOTS, device=device)
    out = torch.ops.pc.gather_slots(cache, slots)
    assert out.is_contiguous()
    assert same_bits(out, oracle(cache, slots))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16, 24, 33, 48, 100, 512, 1000, 4096, 4112, 65536])
def test_rows_of_any_number_of_bytes(size, random_bits, same_bits, device):
    cache = random_bits((6, 4, size), torch.uint8)
    slots = torch.tensor(SLOTS, device=device)
    assert same_bits(torch.ops.pc.gather_slots(cache, slots), oracle(cache, slots))


def test_one_value_a_token(random_bits, same_bits, device):
    cache = random_bits((6, 4), torch.int64)
    slots = torch.tensor(SLOTS, device=device)
    assert same_bits(torch.ops.pc.gather_slots(cache, slots), oracle(cache, slots))


def test_seven_strided_dimensions(random_bits, same_bits, device):
    cache = random_bits((6, 2, 3, 2, 2, 3, 4), torch.float32).permute(0, 6, 1, 2, 3, 4, 5)[:, :, :, ::2, :, :, ::2]
    slots = torch.tensor(SLOTS, device=device)
    assert same_bits(torch.ops.pc.gather_slots(cache, slots), oracle(cache, slots))


def test_index_dtypes_and_strides(random_bits, same_bits, device):
    cache = random_bits((6, 4, 10), torch.float16)
    slots = torch.tensor(SLOTS, device=device)
    expected = oracle(cache, slots)
    assert same_bits(torch.ops.pc.gather_slots(cache, slots.int()), expected)
    assert same_bits(torch.ops.pc.gather_slots(cache, slots.repeat_interleave(2)[::2]), expected)


@pytest.mark.parametrize("shape", [(6, 4, 0), (0, 4, 5), (6, 4, 5)])
def test_nothing_to_gather(shape, device):
    cache = torch.zeros(shape, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert torch.ops.pc.gather_slots(cache, empty).shape == (0, shape[2])
    holes = torch.full((3,), -1, device=device)
    assert torch.equal(torch.ops.pc.gather_slots(cache, holes), torch.zeros(3, shape[2], device=device))


def test_offsets_beyond_two_to_the_31(device):
    block_bytes = 1 << 20
    num_blocks = (1 << 32) // block_bytes + 2
    if device.type == "cuda":
        cache = torch.zeros(num_blocks, 256, block_bytes // 256, dtype=torch.uint8, device=device)
    else:  # numpy's zeros cost no memory until they are touched
        cache = torch.from_numpy(np.zeros((num_blocks, 256, block_bytes // 256), np.uint8))
    places = [(0, 3), (2047, 255), (2048, 0), (4095, 17), (4097, 255)]
    for value, (block, offset) in enumerate(places, 1):
        cache[block, offset] = value
    slots = torch.tensor([block * 256 + offset for block, offset in places], device=device)
    out = torch.ops.pc.gather_slots(cache, slots)
    assert out.amin(1).tolist() == out.amax(1).tolist() == [1, 2, 3, 4, 5]


def test_list_of_caches_of_different_rows(random_bits, same_bits, device):
    caches = [random_bits((6, 4, 3 * i + 1), dtype) for i, dtype in enumerate(DTYPES)]
    slots = torch.tensor(SLOTS, device=device)
    outs = torch.ops.pc.gather_slots_list(caches, slots)
    assert len(outs) == len(caches)
    for cache, out in zip(caches, outs, strict=True):
        assert same_bits(out, oracle(cache, slots))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: {"cache": a["cache"][0, 0]}, ValueError, r"cache: got shape \[5\]"),
        (lambda a: {"cache": None}, TypeError, "cache: got None"),
        (lambda a: {"slot_mapping": None}, TypeError, "slot_mapping: got None"),
        (lambda a: {"slot_mapping": a["slot_mapping"].float()}, TypeError, "slot_mapping: .*int32 or int64"),
        (lambda a: {"slot_mapping": a["slot_mapping"][None]}, ValueError, r"slot_mapping: got shape \[1, 3\]"),
        (lambda a: {"slot_mapping": a["slot_mapping"] + 30}, ValueError, "slot_mapping: got values from 30 to 32"),
        (lambda a: {"slot_mapping": a["slot_mapping"] - 2}, ValueError, "needs -1 to 23"),
        (lambda a: {"cache": a["cache"].requires_grad_()}, RuntimeError, "cache: got a tensor that requires grad"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"cache": torch.zeros(6, 4, 5), "slot_mapping": torch.tensor([0, 1, 2])}
    with pytest.raises(error, match=message):
        pc.gather_slots(**{**arguments, **change(arguments)})


def test_lists_that_do_not_agree_are_refused():
    slots = torch.tensor([0])
    with pytest.raises(ValueError, match="caches: got an empty list"):
        pc.gather_slots_list([], slots)
    with pytest.raises(ValueError, match=r"caches: .*the same blocks in all"):
        pc.gather_slots_list([torch.zeros(6, 4, 5), torch.zeros(6, 3, 5)], slots)


@pytest.mark.slow
def test_compiles_whole_with_dynamic_shapes(random_bits, device):
    compiled = torch.compile(lambda cache, slots: pc.gather_slots(cache * 2, slots) + 1, fullgraph=True, dynamic=True)
    cache = torch.randn(6, 4, 5, device=device)
    for slots in (torch.tensor(SLOTS, device=device), torch.tensor([3, 4], device=device)):
        assert torch.equal(compiled(cache, slots).cpu(), oracle(cache * 2, slots) + 1)


@pytest.mark.gpu
def test_pinned_memory_and_a_captured_graph(same_bits):
    cache = torch.randn(64, 16, 1024).bfloat16()
    slots = torch.randint(-1, 1024, (300,))
    expected = oracle(cache, slots)
    pinned = cache.pin_memory()
    assert same_bits(pc.gather_slots(pinned, slots.cuda()), expected)
    assert same_bits(pc.gather_slots(pinned, slots, device="cuda"), expected)
    runs = torch.arange(1024)
    assert same_bits(pc.gather_slots(pinned, runs, device="cuda"), cache.view(1024, 1024))
    back = pc.gather_slots(cache.cuda(), slots, device="cpu")
    torch.cuda.synchronize()
    assert same_bits(back, expected)
    with pytest.raises(ValueError, match="pinned memory"):
        pc.gather_slots(cache, slots.cuda())

    device_cache, device_slots = cache.cuda(), slots.cuda()
    pc.gather_slots(device_cache, device_slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pc.gather_slots(device_cache, device_slots)
    device_slots.copy_(slots.flip(0))
    graph.replay()
    assert same_bits(out, expected.flip(0))
