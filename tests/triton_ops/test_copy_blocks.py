from __future__ import annotations

import numpy as np
import pytest
import torch

import pc

DTYPES = (torch.bool, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
SOURCES, TARGETS = (0, 2, -1, 3, -1, 2), (5, 6, 7, -1, -1, 1)


def oracle(cache, sources, targets):
    out = cache.cpu().contiguous().clone()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if target >= 0:
            out[target] = cache[source].cpu() if source >= 0 else torch.zeros_like(out[target])
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(layout, dtype, strided, same_bits, device):
    cache = strided(layout, (8, 4, 3, 8), dtype)
    sources, targets = torch.tensor(SOURCES, device=device), torch.tensor(TARGETS, device=device)
    expected = oracle(cache, sources, targets)
    torch.ops.pc.copy_blocks(cache, sources, targets)
    assert same_bits(cache, expected)


@pytest.mark.parametrize("size", [1, 5, 1000, 65536])
def test_blocks_of_any_size(size, random_bits, same_bits, device):
    cache = random_bits((8, 16, size), torch.uint8)
    sources, targets = (torch.tensor(ids, dtype=torch.int32, device=device) for ids in (SOURCES, TARGETS))
    expected = oracle(cache, sources, targets)
    torch.ops.pc.copy_blocks(cache, sources, targets)
    assert same_bits(cache, expected)


def test_nothing_to_copy(device):
    cache, empty = torch.ones(6, 4, 5, device=device), torch.empty(0, dtype=torch.int64, device=device)
    torch.ops.pc.copy_blocks(cache, empty, empty)
    torch.ops.pc.copy_blocks(cache[..., :0], torch.tensor([1], device=device), torch.tensor([0], device=device))
    assert bool((cache == 1).all())


def test_offsets_beyond_two_to_the_31(device):
    if device.type == "cuda":
        cache = torch.zeros(2051, 16, 1 << 16, dtype=torch.uint8, device=device)
    else:
        cache = torch.from_numpy(np.zeros((2051, 16, 1 << 16), np.uint8))
    cache[2050] = 7
    torch.ops.pc.copy_blocks(cache, torch.tensor([2050], device=device), torch.tensor([2048], device=device))
    assert bool((cache[2048] == 7).all())
    assert not bool(cache[2047].any() | cache[2049].any())


def test_list_of_caches(random_bits, same_bits, device):
    caches = [random_bits((8, 4, i + 1), DTYPES[i % len(DTYPES)]) for i in range(10)]
    sources, targets = torch.tensor(SOURCES, device=device), torch.tensor(TARGETS, device=device)
    expected = [oracle(cache, sources, targets) for cache in caches]
    torch.ops.pc.copy_blocks_list(caches, sources, targets)
    assert all(same_bits(cache, want) for cache, want in zip(caches, expected, strict=True))


def test_bad_arguments_are_named_and_nothing_is_written():
    cache = torch.arange(6.0).view(6, 1, 1).clone()
    with pytest.raises(ValueError, match="source_ids: got values from 0 to 6, needs -1 to 5"):
        pc.copy_blocks(cache, torch.tensor([0, 6]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="target_ids: got values from -2 to 2"):
        pc.copy_blocks(cache, torch.tensor([0, 5]), torch.tensor([-2, 2]))
    with pytest.raises(ValueError, match="target_ids: got 1 elements, needs 2"):
        pc.copy_blocks(cache, torch.tensor([0, 5]), torch.tensor([2]))
    with pytest.raises(TypeError, match=r"target_ids: .*int32 or int64"):
        pc.copy_blocks(cache, torch.tensor([0]), torch.tensor([2.0]))
    assert cache.flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_compiles_whole_with_dynamic_shapes(device):
    def step(cache, sources, targets):
        pc.copy_blocks(cache, sources, targets)
        return cache.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for count in (6, 2):
        cache = torch.randn(8, 4, 5, device=device)
        sources, targets = (torch.tensor(ids[:count], device=device) for ids in (SOURCES, TARGETS))
        expected = oracle(cache, sources, targets)
        compiled(cache, sources, targets)
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.gpu
def test_ids_from_the_host(same_bits):
    cache, sources, targets = torch.randn(8, 16, 64), torch.tensor(SOURCES), torch.tensor(TARGETS)
    expected, on_device = oracle(cache, sources, targets), cache.cuda()
    pc.copy_blocks(on_device, sources, targets)
    assert same_bits(on_device, expected)
