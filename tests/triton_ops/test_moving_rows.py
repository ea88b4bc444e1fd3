"""Gather, scatter and copy of blocks and of slots against plain indexing, bit for bit: a table of operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import check_refused
from row_cases import OPS, Op, same_bits

import pc
from pc.triton_ops._copy.launch import TILE_UNITS, tile_of
from pc.triton_ops._core.runtime import HAS_TRITON

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64),
    torch.complex128,
)
OF_EACH_SIZE = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.float8_e4m3fn)


GATHER_BLOCKS, GATHER, SCATTER_BLOCKS, SCATTER, COPY = OPS
each = pytest.mark.parametrize("op", OPS, ids=str)


@pytest.fixture
def holds(random_bits: Any, device: torch.device) -> Any:
    """holds(op, cache, index, source): checks an operator; by default with its own index and random bits."""

    def check(op: Op, cache: torch.Tensor, index: Any = None, source: Any = None) -> None:
        index = op.indices(device) if index is None else index
        if op.has_source and source is None:
            source = random_bits((len(index[0]), *cache.shape[op.leading :]), cache.dtype)
        op.check(source, cache, *index)

    return check


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(op, dtype, random_bits, holds):
    holds(op, random_bits((8, 4, 3, 5), dtype))


@each
@pytest.mark.parametrize("dtype", OF_EACH_SIZE, ids=str)
def test_every_layout(op, layout, dtype, strided, holds):
    holds(op, strided(layout, (8, 4, 3, 8), dtype))


@each
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16, 24, 33, 48, 100, 512, 1000, 4096, 4112, 65536])
def test_rows_of_any_number_of_bytes(op, size, random_bits, holds, device):
    holds(op, random_bits((8, 4, size), torch.uint8), op.indices(device, torch.int32))


@each
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_blocks_of_any_size(op, block_size, random_bits, holds):
    for size in (1, 5, 16, 1000):
        holds(op, random_bits((24 // min(block_size, 3), block_size, size), torch.uint8))


@each
@pytest.mark.quick
def test_features_of_any_number_and_strided_indices(op, random_bits, holds, device):
    holds(op, random_bits((8, 4), torch.int64))
    many = random_bits((8, 2, 3, 2, 2, 3, 4), torch.float32).permute(0, 6, 1, 2, 3, 4, 5)[:, :, :, ::2, :, :, ::2]
    holds(op, many)
    index = [number.repeat_interleave(2)[::2] for number in op.indices(device)]
    holds(op, random_bits((8, 4, 10), torch.float16), index)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("holes", [(), (0, 1, -1), (1, 3), tuple(range(7))], ids=["none", "around", "among", "all"])
def test_holes_and_strided_sources(holes, dtype, random_bits, holds, device):
    slots = torch.tensor([5, 0, 23, 7, 8, 9, 10], device=device)
    slots[[*holes]] = -1
    holds(SCATTER, random_bits((6, 4, 3, 5), dtype), [slots])
    source = random_bits((8, 3, 14), dtype).permute(2, 1, 0)[::2]
    holds(SCATTER, random_bits((6, 4, 3, 8), dtype), [slots], source)


@each
@pytest.mark.quick
def test_any_strides_of_dimensions_of_size_one(op, holds, device):
    """They may not be multiples of 16 bytes, although PyTorch says that the tensor is contiguous."""
    index = [torch.zeros(1, dtype=torch.int64, device=device)] * len(op.index)
    for dtype in (torch.uint8, torch.float32):
        zeros, ones = torch.zeros(64, dtype=dtype, device=device), torch.ones(64, dtype=dtype, device=device)
        for strides in ((33, 17, 7, 1), (16, 16, 16, 1)):
            source = ones.as_strided((1,) * (4 - op.leading) + (16,), (19, 5, 3, 1)[op.leading - 1 :])
            holds(op, zeros.clone().as_strided((1, 1, 1, 16), strides), index, source)


@each
@pytest.mark.quick
@pytest.mark.parametrize("shape", [(6, 4, 0), (0, 4, 5), (6, 4, 5)])
def test_nothing_to_move(op, shape, device):
    cache, count = torch.ones(shape, device=device), 3
    for number in (torch.empty(0, dtype=torch.int64, device=device), torch.full((count,), -1, device=device)):
        source = torch.full((len(number), *shape[op.leading :]), 2.0, device=device)
        out = op.run(source, cache, *[number] * len(op.index))
        assert torch.equal(out, torch.ones(shape, device=device) if op.writes else torch.zeros_like(source))


@each
def test_offsets_beyond_two_to_the_31(op, device):
    """Untouched pages of numpy's zeros need no memory."""
    shape = (2051, 16, 1 << 16)
    on_host = device.type == "cpu"
    cache = torch.from_numpy(np.zeros(shape, np.uint8)) if on_host else torch.zeros(shape, dtype=torch.uint8).to(device)
    places = [2050, 2047] if op.leading == 1 else [2050 * 16 + 1, 2047 * 16 + 15]
    index = torch.tensor(places, device=device)
    rows = cache if op.leading == 1 else cache.flatten(0, 1)
    source = torch.stack([torch.full_like(rows[0], value) for value in (1, 2)])
    if op is COPY:
        cache[places[0]] = 1
        pc.copy_blocks(cache, index[:1], index[1:])
        assert bool((cache[places[1]] == 1).all())
    elif op.has_source:
        op.run(source, cache, index)
        assert torch.equal(rows[index], source)
    else:
        rows[index] = source
        assert torch.equal(op.run(None, cache, index), source)
    assert not bool(rows[places[1] - 1].any() | rows[places[1] + 1].any() | rows[places[0] - 1].any())


@each
@pytest.mark.quick
def test_lists_of_caches_of_different_rows(op, random_bits, device):
    caches = [random_bits((8, 4, 3 * i + 1), dtype) for i, dtype in enumerate(DTYPES)]
    index = op.indices(device)
    sources = [random_bits((len(index[0]), *cache.shape[op.leading :]), cache.dtype) for cache in caches]
    expected = [op.expected(source, cache, *index) for source, cache in zip(sources, caches, strict=True)]
    outs = getattr(torch.ops.pc, f"{op}_list")(*([sources] if op.has_source else []), caches, *index)
    for out, want in zip(caches if op.writes else outs, expected, strict=True):
        assert same_bits(out, want)


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 3, 64, 100, 1000, 1536, 6144, 100000])
def test_tiles_are_full_and_waste_little(width, unit):
    rows, cols = tile_of(width, unit)
    assert rows * cols == TILE_UNITS
    covered = -(-width // cols) * cols
    assert covered <= width + width // 8 or cols * unit <= 512


if HAS_TRITON:
    import triton
    import triton.language as tl

    from pc.triton_ops.kernels.move_rows import _column_offsets, _row_offsets

    @triton.jit
    def _offsets_kernel(out_ptr, address, strides, VECTOR: tl.constexpr):
        number = tl.arange(0, 2)
        tl.store(out_ptr + number, _row_offsets(number.to(tl.int64), address, VECTOR))
        tl.store(out_ptr + 2 + number, _column_offsets(number * VECTOR, 1, (2,), strides, VECTOR, 1))


@pytest.mark.interpreter
def test_strides_that_pass_32_bits_in_units_only(device):
    """2**30 grains of 16 bytes are 2**31 units of 8 bytes."""
    out = torch.zeros(4, dtype=torch.int64, device=device)
    _offsets_kernel[(1,)](out, (1, 2**30, 0), (2**30,), VECTOR=2)
    assert out.tolist() == [0, 2**31] * 2


def _arguments(op: Op) -> dict[str, Any]:
    index = ["source_ids", "target_ids"] if op is COPY else ["block_ids" if op.leading == 1 else "slot_mapping"]
    source = {"source": torch.ones((3, 5) if op is SCATTER else (3, 4, 5))} if op.has_source else {}
    return {**source, "cache": torch.zeros(6, 4, 5), **{name: torch.arange(3) + i for i, name in enumerate(index)}}


REFUSED = [
    *((op, "cache", lambda x: x[0, 0], r"cache: got shape \[5\]") for op in (*OPS[:2], COPY)),
    *((op, "cache", lambda x: None, "cache: got None") for op in OPS[:2]),
    *((op, "source", lambda x: x[:2], r"source: got shape \[2, .*needs \[3, ") for op in OPS[2:4]),
    *((op, "source", lambda x: x.double(), "source: got float64") for op in OPS[2:4]),
    *((op, "source", lambda x: None, "source: got None") for op in OPS[2:4]),
    (SCATTER, "cache", lambda x: x[..., :4], r"source: got shape \[3, 5\], needs \[3, 4\]"),
    (COPY, "target_ids", lambda x: x[:1], "target_ids: got 1 elements, needs 3"),
]
for _op in OPS:
    _name, _limit = [*_arguments(_op)][-1], 5 if _op.leading == 1 else 23
    REFUSED += [
        (_op, _name, lambda x: None, f"{_name}: got None"),
        (_op, _name, lambda x: x.float(), f"{_name}: .*int32 or int64"),
        (_op, _name, lambda x: x.to(torch.int16), f"{_name}: .*int32 or int64"),
        (_op, _name, lambda x: x[None], rf"{_name}: got shape \[1, 3\]"),
        (_op, _name, lambda x, n=_limit: x - x[0] + n, f"{_name}: got values from {_limit} to {_limit + 2}"),
        (_op, _name, lambda x: x - x[0] - 2, f"needs -1 to {_limit}"),
    ]


@pytest.mark.parametrize(("op", "name", "change", "message"), REFUSED)
def test_bad_arguments_are_named_and_nothing_is_written(op, name, change, message):
    check_refused(getattr(pc, op.name), _arguments(op), {name: change}, message)


def test_lists_that_do_not_agree_are_refused_and_nothing_is_written():
    cache, other, slots = torch.zeros(6, 4, 5), torch.zeros(6, 4, 3), torch.arange(3)
    with pytest.raises(ValueError, match="caches: got an empty list"):
        pc.gather_slots_list([], slots)
    with pytest.raises(ValueError, match=r"caches: .*the same blocks in all"):
        pc.gather_slots_list([cache, torch.zeros(6, 3, 5)], slots)
    with pytest.raises(ValueError, match="sources: got 1 tensors, needs 2"):
        pc.scatter_slots_list([torch.ones(3, 5)], [cache, other], slots)
    for second in (torch.ones(3, 5), torch.ones(3, 3).double(), torch.ones(3, 3).requires_grad_()):
        with pytest.raises((TypeError, ValueError, RuntimeError), match="sources: got"):
            pc.scatter_slots_list([torch.ones(3, 5), second], [cache, other], slots)
    assert not bool(cache.any() | other.any())


@pytest.mark.gpu
@each
def test_pinned_memory_host_indices_and_a_captured_graph(op):
    cache = torch.randn(64, 16, 1024).bfloat16()
    drawn = torch.randperm(64 if op.leading == 1 else 1024)
    index = [drawn[:20], drawn[20:40]] if op is COPY else [drawn[:30]]
    source = torch.randn(30, *cache.shape[op.leading :]).bfloat16()
    expected = op.expected(source, cache, *index)
    for place in ("cpu", "cuda"):
        target = cache.cuda() if op is COPY else cache.pin_memory()
        if not op.writes and place == "cpu":
            out = getattr(pc, op.name)(target, *index, device="cuda")
        else:
            out = op.run(source.cuda(), target, *(number.to(place) for number in index))
        torch.cuda.synchronize()
        assert same_bits(out, expected), place
    if op is GATHER:
        assert same_bits(pc.gather_slots(cache.pin_memory(), torch.arange(1024), device="cuda"), cache.view(1024, 1024))
        back = pc.gather_slots(cache.cuda(), index[0], device="cpu")
        torch.cuda.synchronize()
        assert same_bits(back, expected)
        with pytest.raises(ValueError, match="pinned memory"):
            pc.gather_slots(cache, index[0].cuda())
    elif op is GATHER_BLOCKS:
        assert same_bits(pc.gather_blocks(cache, index[0], device="cuda"), expected)

    target, rows, numbers = cache.cuda(), source.cuda(), [number.cuda() for number in index]
    op.run(rows, target, *numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.run(rows, target, *numbers)
    target.copy_(cache)
    for number, given in zip(numbers, index, strict=True):
        number.copy_(given.flip(0))
    graph.replay()
    assert same_bits(out, op.expected(source, cache, *(number.flip(0) for number in index)))
