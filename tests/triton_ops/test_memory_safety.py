"""Every kernel on ragged shapes in guarded memory, in two orders of its programs; and the guard itself.

All other tests of this folder run in guarded memory too; here are the shapes that tempt a kernel to reach too far, and
the order of the programs is varied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Batch, Case, attend, build, plan_of

import pc
from pc.triton_ops._core.runtime import INTERPRET

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")
if INTERPRET:
    from guarded import guarded_memory
    from triton.runtime.errors import InterpreterError

F16, BF16, F32, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8


@pytest.fixture(autouse=True)
def _guarded_memory():
    """Override the folder's fixture, since these tests use guarded memory themselves."""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def _check(call: Callable[[], Any], *written: torch.Tensor) -> None:
    """Call in the order of the grid and in another one; results and written tensors must have the same bits."""
    before = [tensor.clone() for tensor in written]
    seen = []
    for seed in (None, 1):
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)
        with guarded_memory(seed):
            results = call()
        results = [] if results is None else [results] if isinstance(results, torch.Tensor) else list(results)
        seen.append([_bits(tensor) for tensor in (*results, *written)])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


ATTENTION = [
    Case(lens=(150, 33, 0, 1), queries=(40, 1, 0, 1), head_dim=80, padding=3),
    Case(lens=(63, 8, 0), queries=(9, 8, 0), head_dim=24, block_size=8, heads=(6, 2), dtype=F16, padding=2),
    Case(lens=(129, 300), queries=(2, 17), block_size=128, heads=(5, 1), holes=0.5, alibi=True, dtype=BF16),
    Case(lens=(257,), queries=(1,), block_size=256, head_dim=16, cache_dtype=E4M3, per_head_scales=True),
    Case(lens=(70, 400), queries=(3, 20), window=33, num_sink_tokens=5, cache_dtype=INT8, head_major=True),
    Case(lens=(301, 45), queries=(12, 45), scattered=True, window=17, num_sink_tokens=70, holes=0.3, padding=1),
    Case(lens=(0, 200, 90, 0), queries=(0, 3, 20, 0), scattered=True, causal=False, window=9, softcap=4.0),
    Case(lens=(320, 9), queries=(1, 9), batch_invariant=True, bounds=True, head_dim=40),
    Case(lens=(640,), queries=(1,), heads=(2, 1), head_dim=40, sinks=True),
    Case(lens=(1030,), queries=(9,), heads=(3, 1), head_dim=24, block_size=64),
    Case(lens=(20, 85), queries=(20, 40), block_size=32),
    Case(lens=(), queries=(), padding=2),
]


def _tight(tables: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the first columns of a table, each row of which ends before a gap."""
    wide = torch.full((tables.shape[0], columns + 5), 2**31 - 1, dtype=torch.int32)
    wide[:, :columns] = tables[:, :columns]
    return wide[:, :columns]


def _last_block_in_use(batch: Batch) -> None:
    """Make the first block of the first sequence the last block of the caches."""
    if max(batch.case.lens[:1], default=0) and batch.block_tables[0, 0] >= 0:
        last, first = batch.key_cache.shape[0] - 1, int(batch.block_tables[0, 0])
        batch.block_tables[batch.block_tables == last] = first
        batch.block_tables[0, 0] = last
        for cache in (batch.key_cache, batch.value_cache):
            cache.view(torch.int8)[[first, last]] = cache.view(torch.int8)[[last, first]]


@pytest.mark.parametrize(("planned", "case"), [(i % 2 > 0, case) for i, case in enumerate(ATTENTION)], ids=str)
def test_attention(planned, case):
    batch = build(case)
    _last_block_in_use(batch)
    columns = -(-max(case.lens, default=0) // case.block_size)
    tables = _tight(batch.block_tables, columns)
    wide = torch.full((batch.query.shape[0], case.heads[0] + 1, case.head_dim + 3), float("nan")).to(case.dtype)
    batch.query, batch.block_tables = wide[:, 1:, : case.head_dim].copy_(batch.query), tables
    _check(lambda: attend(batch, "sparse_gap_attention", plan=plan_of(batch) if planned else None))


@pytest.mark.parametrize("lens", [(65, 33), (32, 80)])
def test_shared_prefix(lens):
    batch = build(Case(lens=lens, queries=tuple(range(1, 1 + len(lens))), head_dim=24, padding=1, shared=2))
    batch.block_tables = _tight(batch.block_tables, -(-max(lens) // 16))
    _check(lambda: attend(batch, "shared_prefix_attention"))


@pytest.mark.parametrize("head_dim", [1, 33, 80])
def test_merge(head_dim):
    outs = torch.randn(2, 7, 5, head_dim + 2)[..., :head_dim]
    lses = torch.randn(2, 5, 7).transpose(1, 2)
    _check(lambda: pc.merge_attention(outs[0], lses[0], outs[1], lses[1]))


def _kv(heads: int, head_dim: int, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> list[torch.Tensor]:
    """Return keys and values within wider rows, and caches with one head more than they show."""
    rows = [torch.randn(7, heads + 1, head_dim + 3).to(dtype)[:, 1:, 2 : 2 + head_dim] for _ in range(2)]
    caches = [torch.zeros(3, heads + 1, block_size, head_dim + 1).to(cache_dtype) for _ in range(2)]
    return rows + [cache[:, :heads, :, :head_dim].transpose(1, 2) for cache in caches]


WRITES = [(3, 80, 8, F16, F16), (1, 5, 16, F32, F32), (2, 33, 128, BF16, E4M3), (5, 64, 8, F32, INT8)]


@pytest.mark.parametrize(("heads", "head_dim", "block_size", "dtype", "cache_dtype"), WRITES)
def test_cache_writes(heads, head_dim, block_size, dtype, cache_dtype):
    key, value, key_cache, value_cache = _kv(heads, head_dim, block_size, dtype, cache_dtype)
    slots = torch.tensor([3 * block_size - 1, 0, -1, 5, block_size, -1, 2])
    scales = {} if dtype == cache_dtype else {"k_scale": torch.rand(heads) + 0.1, "v_scale": torch.ones(1)}
    views = [c.view(torch.uint8) if c.dtype == E4M3 else c for c in (key_cache, value_cache)]
    _check(lambda: pc.reshape_and_cache(key, value, key_cache, value_cache, slots, **scales), *views)
    query = torch.randn(7, 3 * heads, head_dim).to(dtype)
    positions = torch.tensor([0, 9, 4, 4, 8, 1, 9], dtype=torch.int32)
    cos_sin = torch.randn(10, head_dim // 2 * 2)
    arguments = (query, key, value, positions, cos_sin, key_cache, value_cache, slots)
    for interleaved in (False, True):
        _check(lambda how=interleaved: pc.rope_and_cache(*arguments, how, **scales), *views)


ROWS = [  # block_size, features, dtype
    (1, (3,), torch.uint8),
    (3, (), torch.int64),
    (16, (5, 24), F16),
    (128, (9,), torch.int8),
    (8, (2, 3, 8), F32),
]


def _caches(block_size: int, features: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return a contiguous cache, one within wider rows and blocks, and one with reversed dimensions."""
    shape = (6, block_size, *features)

    def random(*shape):
        return torch.randint(0, 99, shape).to(dtype)

    wide = random(*(size + 1 for size in shape))
    inner = wide[tuple(slice(1, None) for _ in shape)]
    return [random(*shape), inner, random(*shape[::-1]).permute(*reversed(range(len(shape))))]


@pytest.mark.parametrize(("block_size", "features", "dtype"), ROWS, ids=str)
def test_rows(block_size, features, dtype):
    slots = torch.tensor([6 * block_size - 1, -1, 0, 2 * block_size, -1, 4 * block_size - 1], dtype=torch.int32)
    blocks = torch.tensor([5, -1, 0, 3])
    caches = _caches(block_size, features, dtype)
    new = _caches(block_size, features, dtype)
    rows, whole = [n[0].new_zeros(6, *features) for n in new], [n[:4] for n in new]
    _check(lambda: pc.gather_slots_list(caches, slots))
    _check(lambda: pc.gather_blocks_list(caches, blocks))
    _check(lambda: pc.scatter_slots_list(rows, caches, slots), *caches)
    _check(lambda: pc.scatter_blocks_list(whole, caches, blocks), *caches)
    _check(lambda: pc.copy_blocks_list(caches, torch.tensor([1, -1, 2]), torch.tensor([0, 5, -1])), *caches)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_join(block_size, scattered):
    lens, starts = torch.tensor([130, 0, 1, 37]), torch.tensor([0, 3, 3, 3, 20])
    tables = _tight(torch.arange(4 * 130).view(4, 130).int() % 5, -(-130 // block_size))
    tables[0, :1] = -1
    caches = [torch.randn(5, block_size, 3), torch.randn(5, block_size + 1, 2, 7)[:, 1:, :, :6]]
    news = [torch.randn(22, *cache.shape[2:]) for cache in caches]
    positions = torch.tensor([0, 64, 129, *range(5, 22), 0, 0]) if scattered else None
    _check(lambda: pc.join_prefix_list(caches, tables, lens, news, starts, 170, positions))


@triton.jit
def _shift_kernel(source, target, first, step, SIZE: tl.constexpr, MASKED: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if MASKED:
        data = tl.load(source + first + offs * step, mask=offs < 0, other=7.0)
    else:
        data = tl.load(source + first + offs * step)
    tl.store(target + offs, data)


@triton.jit
def _write_kernel(values, step, first):
    pid = tl.program_id(0)
    tl.store(values + pid * step, tl.load(values + first + pid))


@triton.jit
def _fold_kernel(values, SIZE: tl.constexpr):
    tl.store(values + tl.arange(0, SIZE) // 2, tl.zeros([SIZE], tl.float32))


@triton.jit
def _ticket_kernel(counter, tickets):
    tl.store(tickets + tl.program_id(0) * 4 + tl.program_id(1), tl.atomic_add(counter, 1))


@pytest.mark.parametrize(
    ("source", "first", "step"),
    [
        (torch.zeros(8), 1, 1),
        (torch.zeros(8), -1, 1),
        (torch.zeros(8), 1 << 30, 1),
        (torch.zeros(4, 3)[:, :2], 0, 1),
        (torch.zeros(16)[:8], 0, 2),
        (torch.zeros(0), 0, 1),
    ],
    ids=["behind", "before", "far", "gap", "storage", "empty"],
)
def test_the_guard_sees_what_is_outside_of_a_tensor(source, first, step):
    target = torch.empty(8)
    with guarded_memory():
        _shift_kernel[(2,)](source, target, first, step, SIZE=4, MASKED=True)
        assert torch.equal(target, torch.full((8,), 7.0))
        _shift_kernel[(2,)](torch.arange(8.0), target, 0, 1, SIZE=4, MASKED=False)
        assert torch.equal(target, torch.arange(8.0))
        with pytest.raises(InterpreterError, match=r"_shift_kernel, program .*load at bytes .* of float32"):
            _shift_kernel[(2,)](source, target, first, step, SIZE=4, MASKED=False)
        with pytest.raises(InterpreterError, match="store at bytes"):
            _shift_kernel[(2,)](torch.arange(8.0), target[:7], 0, 1, SIZE=4, MASKED=False)


@pytest.mark.parametrize("seed", [None, 1])
def test_the_guard_sees_races(seed):
    values = torch.arange(8.0)
    with guarded_memory(seed):
        _write_kernel[(4,)](values, 1, 0)
        _write_kernel[(4,)](values, 1, 4)
        for step, first, kind in ((0, 4, "store to what"), (1, 1, "another program (reads|writes)")):
            with pytest.raises(InterpreterError, match=kind):
                _write_kernel[(4,)](values, step, first)
        with pytest.raises(InterpreterError, match="two lanes"):
            _fold_kernel[(1,)](values, SIZE=4)


def test_programs_run_in_another_order():
    orders = []
    for seed in (None, 1):
        tickets = torch.zeros(8, dtype=torch.int32)
        with guarded_memory(seed):
            _ticket_kernel[(2, 4)](torch.zeros(1, dtype=torch.int32), tickets)
        orders.append(tickets.tolist())
    assert orders[0] == sorted(orders[1]) == list(range(8))
    assert orders[0] != orders[1]
