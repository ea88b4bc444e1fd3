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
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)
SLOT_LISTS = {
    "plain": (5, 0, 23, 7, 8, 9, 10),
    "padded": (-1, -1, 5, 0, 23, 7, -1),
    "scattered_holes": (5, -1, 0, -1, 23, 7, 8),
    "all_holes": (-1, -1, -1, -1, -1, -1, -1),
}


def oracle(source, cache, slots):
    """The cache after the scatter, contiguous, on the CPU."""
    rows = cache.cpu().contiguous().clone().view(-1, *cache.shape[2:])
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows[slot] = source[i].cpu()
    return rows.view(cache.shape)


@pytest.mark.parametrize("slots", SLOT_LISTS.values(), ids=SLOT_LISTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype, slots, random_bits, same_bits, device):
    cache, source = random_bits((6, 4, 3, 5), dtype), random_bits((7, 3, 5), dtype)
    slots = torch.tensor(slots, device=device)
    expected = oracle(source, cache, slots)
    torch.ops.pc.scatter_slots(source, cache, slots)
    assert same_bits(cache, expected)


@pytest.mark.parametrize("slots", ["plain", "scattered_holes"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_every_layout(layout, dtype, slots, strided, random_bits, same_bits, device):
    cache, source = strided(layout, (6, 4, 3, 8), dtype), random_bits((7, 3, 8), dtype)
    around = None if cache._base is None else cache._base.clone()
    slots = torch.tensor(SLOT_LISTS[slots], device=device)
    expected = oracle(source, cache, slots)
    torch.ops.pc.scatter_slots(source, cache, slots)
    assert same_bits(cache, expected)
    if around is not None:  # the bytes between the rows stay as they were
        inside = torch.zeros_like(cache._base, dtype=torch.bool)
        inside.as_strided(cache.shape, cache.stride(), cache.storage_offset()).fill_(True)
        assert same_bits(cache._base[~inside], around[~inside])


def test_strided_source(random_bits, same_bits, device):
    cache = random_bits((6, 4, 3, 8), torch.bfloat16)
    source = random_bits((8, 3, 14), torch.bfloat16).permute(2, 1, 0)[::2]
    slots = torch.tensor(SLOT_LISTS["plain"], device=device)
    expected = oracle(source, cache, slots)
    torch.ops.pc.scatter_slots(source, cache, slots)
    assert same_bits(cache, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, 100, 1000, 4112, 65536])
def test_rows_of_any_number_of_bytes(size, random_bits, same_bits, device):
    cache, source = random_bits((6, 4, size), torch.uint8), random_bits((7, size), torch.uint8)
    slots = torch.tensor(SLOT_LISTS["padded"], dtype=torch.int32, device=device)
    expected = oracle(source, cache, slots)
    torch.ops.pc.scatter_slots(source, cache, slots)
    assert same_bits(cache, expected)


@pytest.mark.parametrize(
    "order", [[*range(40, 104)], [*range(40, 70), 71, 70, *range(72, 104)]], ids=["run", "swapped"]
)
def test_a_megabyte_to_consecutive_slots(order, random_bits, same_bits, device):
    cache, source = random_bits((8, 16, 1 << 14), torch.uint8), random_bits((64, 1 << 14), torch.uint8)
    slots = torch.tensor(order, device=device)
    expected = oracle(source, cache, slots)
    torch.ops.pc.scatter_slots(source, cache, slots)
    assert same_bits(cache, expected)


def test_nothing_to_scatter(device):
    cache = torch.ones(6, 4, 5, device=device)
    torch.ops.pc.scatter_slots(torch.empty(0, 5, device=device), cache, torch.empty(0, dtype=torch.long, device=device))
    assert bool((cache == 1).all())
    torch.ops.pc.scatter_slots(torch.empty(2, 0, device=device), cache[..., :0], torch.tensor([0, 1], device=device))
    holes = torch.full((2,), -1, device=device)
    torch.ops.pc.scatter_slots(torch.empty(2, 5, device=device), torch.empty(0, 4, 5, device=device), holes)


def test_offsets_beyond_two_to_the_31(device):
    if device.type == "cuda":
        cache = torch.zeros(2051, 16, 1 << 16, dtype=torch.uint8, device=device)
    else:
        cache = torch.from_numpy(np.zeros((2051, 16, 1 << 16), np.uint8))
    source = torch.stack([torch.full((1 << 16,), i, dtype=torch.uint8, device=device) for i in (1, 2)])
    torch.ops.pc.scatter_slots(source, cache, torch.tensor([2047 * 16 + 15, 2050 * 16 + 1], device=device))
    assert bool((cache[2047, 15] == 1).all())
    assert bool((cache[2050, 1] == 2).all())
    assert not bool(cache[2047, :15].any())
    assert not bool(cache[2050, 2:].any())


def test_list_of_caches(random_bits, same_bits, device):
    caches = [random_bits((6, 4, 2 * i + 1), dtype) for i, dtype in enumerate(DTYPES)]
    sources = [random_bits((7, 2 * i + 1), dtype) for i, dtype in enumerate(DTYPES)]
    slots = torch.tensor(SLOT_LISTS["scattered_holes"], device=device)
    expected = [oracle(source, cache, slots) for source, cache in zip(sources, caches, strict=True)]
    torch.ops.pc.scatter_slots_list(sources, caches, slots)
    assert all(same_bits(cache, want) for cache, want in zip(caches, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: {"source": a["source"][:2]}, ValueError, r"source: got shape \[2, 5\], needs \[3, 5\]"),
        (lambda a: {"source": a["source"].double()}, TypeError, "source: got float64"),
        (lambda a: {"source": None}, TypeError, "source: got None"),
        (lambda a: {"slot_mapping": None}, TypeError, "slot_mapping: got None"),
        (lambda a: {"cache": a["cache"][..., :4]}, ValueError, r"source: got shape \[3, 5\], needs \[3, 4\]"),
        (lambda a: {"slot_mapping": a["slot_mapping"] + 22}, ValueError, "slot_mapping: got values from 22 to 24"),
        (lambda a: {"slot_mapping": a["slot_mapping"] - 3}, ValueError, "needs -1 to 23"),
        (lambda a: {"source": a["source"].requires_grad_()}, RuntimeError, "source: got a tensor that requires grad"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(change, error, message):
    arguments = {"source": torch.ones(3, 5), "cache": torch.zeros(6, 4, 5), "slot_mapping": torch.tensor([0, 1, 2])}
    with pytest.raises(error, match=message):
        pc.scatter_slots(**{**arguments, **change(arguments)})
    assert not bool(arguments["cache"].any())


def test_lists_that_do_not_agree_are_refused():
    cache, source, slots = torch.zeros(6, 4, 5), torch.ones(1, 5), torch.tensor([0])
    with pytest.raises(ValueError, match="sources: got 1 tensors, needs 2"):
        pc.scatter_slots_list([source], [cache, cache.clone()], slots)


@pytest.mark.parametrize("shape", [(1024, 1, 256), (1, 8, 256 * 1024)], ids=str)
def test_large_source_is_not_repeated(shape):
    """Large enough for a plain copy, over slots that follow each other: a copy would take it."""
    cache = torch.zeros(64, 16, 8, shape[2]) if shape[0] > 1 else torch.zeros(1, 16, 8, shape[2])
    slots = torch.arange(shape[0] if shape[0] > 1 else 8)
    with pytest.raises(ValueError, match=r"source: got shape .*needs"):
        pc.scatter_slots(torch.ones(shape), cache, slots)
    assert not bool(cache.any())


@pytest.mark.parametrize(
    "second",
    [torch.ones(3, 5), torch.ones(3, 4).double(), torch.ones(3, 4).requires_grad_()],
    ids=["shape", "dtype", "grad"],
)
def test_list_whose_second_source_is_refused_writes_nothing(second):
    caches = [torch.zeros(4, 16, 8), torch.zeros(4, 16, 4)]
    with pytest.raises((TypeError, ValueError, RuntimeError), match="sources: got"):
        pc.scatter_slots_list([torch.ones(3, 8), second], caches, torch.arange(3))
    assert not any(bool(cache.any()) for cache in caches)


@pytest.mark.slow
def test_compiles_whole_with_dynamic_shapes(device):
    def step(source, cache, slots):
        pc.scatter_slots(source * 2, cache, slots)
        return cache.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for count in (7, 3):
        cache, source = torch.randn(6, 4, 5, device=device), torch.randn(count, 5, device=device)
        slots = torch.tensor(SLOT_LISTS["scattered_holes"][:count], device=device)
        expected = oracle(source * 2, cache, slots)
        compiled(source, cache, slots)
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.gpu
def test_pinned_memory_and_a_captured_graph(same_bits):
    cache, source = torch.randn(64, 16, 1024).bfloat16(), torch.randn(300, 1024).bfloat16()
    slots = torch.randperm(1024)[:300]
    expected = oracle(source, cache, slots)
    for index in (slots, slots.cuda()):
        target = cache.pin_memory()
        pc.scatter_slots(source.cuda(), target, index)
        torch.cuda.synchronize()
        assert same_bits(target, expected)
    runs, target = torch.arange(300), cache.pin_memory()
    pc.scatter_slots(source.cuda(), target, runs)
    torch.cuda.synchronize()
    assert same_bits(target, oracle(source, cache, runs))

    target, rows, index = cache.cuda(), source.cuda(), slots.cuda()
    pc.scatter_slots(rows, target, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pc.scatter_slots(rows, target, index)
    target.copy_(cache)
    index.copy_(slots.flip(0))
    graph.replay()
    assert same_bits(target, oracle(source, cache, slots.flip(0)))
