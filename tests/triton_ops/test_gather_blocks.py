from __future__ import annotations

import numpy as np
import pytest
import torch

import pc

DTYPES = (torch.bool, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
IDS = (5, -1, 0, 3, 3, -1, 1, 2)


def oracle(cache, ids):
    cache = cache.cpu()
    return torch.stack([cache[i] if i >= 0 else torch.zeros_like(cache[0]) for i in ids.tolist()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(layout, dtype, strided, same_bits, device):
    cache = strided(layout, (6, 4, 3, 8), dtype)
    ids = torch.tensor(IDS, device=device)
    out = torch.ops.pc.gather_blocks(cache, ids)
    assert out.is_contiguous()
    assert same_bits(out, oracle(cache, ids))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 5, 16, 1000, 4096])
def test_blocks_of_any_size(block_size, size, random_bits, same_bits, device):
    cache = random_bits((6, block_size, size), torch.uint8)
    ids = torch.tensor(IDS, dtype=torch.int32, device=device)
    assert same_bits(torch.ops.pc.gather_blocks(cache, ids), oracle(cache, ids))


@pytest.mark.parametrize("shape", [(6, 4, 0), (0, 4, 5), (6, 4, 5)])
def test_nothing_to_gather(shape, device):
    cache = torch.zeros(shape, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert torch.ops.pc.gather_blocks(cache, empty).shape == (0, *shape[1:])
    holes = torch.full((3,), -1, device=device)
    assert torch.equal(torch.ops.pc.gather_blocks(cache, holes), torch.zeros(3, *shape[1:], device=device))


def test_offsets_beyond_two_to_the_31(device):
    num_blocks = 2051
    if device.type == "cuda":
        cache = torch.zeros(num_blocks, 16, 1 << 16, dtype=torch.uint8, device=device)
    else:
        cache = torch.from_numpy(np.zeros((num_blocks, 16, 1 << 16), np.uint8))
    cache[2047], cache[2050] = 1, 2
    out = torch.ops.pc.gather_blocks(cache, torch.tensor([2050, 2047], device=device))
    assert out.amin((1, 2)).tolist() == out.amax((1, 2)).tolist() == [2, 1]


def test_list_of_caches(random_bits, same_bits, device):
    caches = [random_bits((6, 4, i + 1), DTYPES[i % len(DTYPES)]) for i in range(10)]
    ids = torch.tensor(IDS, device=device)
    for cache, out in zip(caches, torch.ops.pc.gather_blocks_list(caches, ids), strict=True):
        assert same_bits(out, oracle(cache, ids))


def test_bad_arguments_are_named():
    cache, ids = torch.zeros(6, 4, 5), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="block_ids: got values from 0 to 6, needs -1 to 5"):
        pc.gather_blocks(cache, torch.tensor([0, 6]))
    with pytest.raises(TypeError, match=r"block_ids: .*int32 or int64"):
        pc.gather_blocks(cache, ids.to(torch.int16))
    with pytest.raises(ValueError, match=r"cache: got shape \[6\]"):
        pc.gather_blocks(torch.zeros(6), ids)


@pytest.mark.slow
def test_compiles_whole_with_dynamic_shapes(device):
    compiled = torch.compile(lambda cache, ids: pc.gather_blocks(cache, ids) + 1, fullgraph=True, dynamic=True)
    cache = torch.randn(6, 4, 5, device=device)
    for ids in (torch.tensor(IDS, device=device), torch.tensor([3], device=device)):
        assert torch.equal(compiled(cache, ids).cpu(), oracle(cache, ids) + 1)


@pytest.mark.gpu
def test_pinned_memory(same_bits):
    cache, ids = torch.randn(64, 16, 1024).bfloat16(), torch.randint(-1, 64, (30,))
    assert same_bits(pc.gather_blocks(cache.pin_memory(), ids.cuda()), oracle(cache, ids))
    assert same_bits(pc.gather_blocks(cache.pin_memory(), ids, device="cuda"), oracle(cache, ids))
    assert same_bits(pc.gather_blocks(cache, ids, device="cuda"), oracle(cache, ids))
