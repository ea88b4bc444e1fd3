from __future__ import annotations

import numpy as np
import pytest
import torch

import pc

DTYPES = (torch.bool, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
IDS = (5, -1, 0, 3, -1, 1)


def oracle(source, cache, ids):
    out = cache.cpu().contiguous().clone()
    for i, block in enumerate(ids.tolist()):
        if block >= 0:
            out[block] = source[i].cpu()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(layout, dtype, strided, random_bits, same_bits, device):
    cache, source = strided(layout, (6, 4, 3, 8), dtype), random_bits((6, 4, 3, 8), dtype)
    ids = torch.tensor(IDS, device=device)
    expected = oracle(source, cache, ids)
    torch.ops.pc.scatter_blocks(source, cache, ids)
    assert same_bits(cache, expected)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 5, 16, 1000, 4096])
def test_blocks_of_any_size(block_size, size, random_bits, same_bits, device):
    cache, source = (random_bits((6, block_size, size), torch.uint8) for _ in range(2))
    ids = torch.tensor(IDS, dtype=torch.int32, device=device)
    expected = oracle(source, cache, ids)
    torch.ops.pc.scatter_blocks(source, cache, ids)
    assert same_bits(cache, expected)


def test_nothing_to_scatter(device):
    cache = torch.ones(6, 4, 5, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    torch.ops.pc.scatter_blocks(torch.empty(0, 4, 5, device=device), cache, empty)
    torch.ops.pc.scatter_blocks(torch.empty(2, 4, 5, device=device), cache, torch.full((2,), -1, device=device))
    assert bool((cache == 1).all())


def test_offsets_beyond_two_to_the_31(device):
    if device.type == "cuda":
        cache = torch.zeros(2051, 16, 1 << 16, dtype=torch.uint8, device=device)
    else:
        cache = torch.from_numpy(np.zeros((2051, 16, 1 << 16), np.uint8))
    torch.ops.pc.scatter_blocks(torch.ones_like(cache[:1]), cache, torch.tensor([2050], device=device))
    assert bool((cache[2050] == 1).all())
    assert not bool(cache[2040:2050].any())


def test_list_of_caches(random_bits, same_bits, device):
    caches = [random_bits((6, 4, i + 1), DTYPES[i % len(DTYPES)]) for i in range(10)]
    sources = [random_bits(cache.shape, cache.dtype) for cache in caches]
    ids = torch.tensor(IDS, device=device)
    expected = [oracle(source, cache, ids) for source, cache in zip(sources, caches, strict=True)]
    torch.ops.pc.scatter_blocks_list(sources, caches, ids)
    assert all(same_bits(cache, want) for cache, want in zip(caches, expected, strict=True))


def test_bad_arguments_are_named_and_nothing_is_written():
    cache, source = torch.zeros(6, 4, 5), torch.ones(2, 4, 5)
    with pytest.raises(ValueError, match="block_ids: got values from 0 to 6, needs -1 to 5"):
        pc.scatter_blocks(source, cache, torch.tensor([0, 6]))
    with pytest.raises(ValueError, match=r"source: got shape \[2, 4, 5\], needs \[1, 4, 5\]"):
        pc.scatter_blocks(source, cache, torch.tensor([0]))
    with pytest.raises(TypeError, match="source: got float64"):
        pc.scatter_blocks(source.double(), cache, torch.tensor([0, 1]))
    assert not bool(cache.any())


@pytest.mark.slow
def test_compiles_whole_with_dynamic_shapes(device):
    def step(source, cache, ids):
        pc.scatter_blocks(source + 1, cache, ids)
        return cache.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for count in (6, 3):
        cache, source = torch.randn(6, 4, 5, device=device), torch.randn(count, 4, 5, device=device)
        ids = torch.tensor(IDS[:count], device=device)
        expected = oracle(source + 1, cache, ids)
        compiled(source, cache, ids)
        assert torch.equal(cache.cpu(), expected)


@pytest.mark.gpu
def test_pinned_memory(same_bits):
    cache, source, ids = torch.randn(64, 16, 1024), torch.randn(30, 16, 1024), torch.randperm(64)[:30]
    for index in (ids, ids.cuda()):
        target = cache.pin_memory()
        pc.scatter_blocks(source.cuda(), target, index)
        torch.cuda.synchronize()
        assert same_bits(target, oracle(source, cache, ids))
