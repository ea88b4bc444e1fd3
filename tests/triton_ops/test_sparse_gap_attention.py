"""pc.sparse_gap_attention: scattered queries, holes, both with windows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import Case, build, check
from counted import counted_work, counts_work

import pc

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
CASES = [
    Case(lens=(300, 90), queries=(40, 3), scattered=True),
    Case(lens=(300, 90), queries=(40, 3), scattered=True, holes=0.6, dtype=F16),
    Case(lens=(500, 90), queries=(12, 3), scattered=True, window=20),
    Case(lens=(500, 400), queries=(12, 30), scattered=True, window=20, num_sink_tokens=150),
    Case(lens=(500, 400), queries=(12, 30), scattered=True, window=20, causal=False, num_sink_tokens=3, dtype=BF16),
    Case(lens=(500, 0, 64), queries=(5, 0, 30), scattered=True, window=90, holes=0.5, sinks=True, alibi=True),
    Case(lens=(500, 100), queries=(9, 30), scattered=True, window=64, batch_invariant=True, padding=2),
    Case(lens=(400, 300), queries=(1, 60), holes=0.9, window=100, num_sink_tokens=64),
    Case(lens=(400, 0, 300, 33), queries=(1, 0, 60, 2), holes=0.6, head_tables=True, heads=(6, 3), padding=2),
    Case(lens=(2500, 900), queries=(1, 3), heads=(4, 2), head_tables=True, holes=0.4, dtype=BF16, sinks=True),
    Case(lens=(500, 90), queries=(12, 3), scattered=True, window=20, head_tables=True, holes=0.3, alibi=True),
    Case(lens=(300, 90), queries=(40, 1), head_tables=True, holes=0.8, cache_dtype=INT8, per_head_scales=True),
    Case(lens=(300, 1900), queries=(20, 1), head_tables=True, holes=0.5, batch_invariant=True, value_dim=24),
]


def _call(batch, op=pc.sparse_gap_attention_with_lse, **options):
    case = batch.case
    return op(
        *batch.tensors, batch.positions, batch.scale, case.window, case.num_sink_tokens, **batch.options, **options
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numerics(case, device):
    batch = build(case).to(device)
    out, lse = _call(batch)
    check(build(case), out, lse)
    assert torch.equal(out, _call(batch, pc.sparse_gap_attention))


@pytest.mark.parametrize("change", [{}, {"softcap": 5.0}, {"alibi": True, "holes": 0.5}, {"causal": False}], ids=str)
def test_scattered_queries_over_many_pieces(change, monkeypatch):
    """The CPU reads the keys once for all scattered queries, piece by piece and slice by slice."""
    from pc.triton_ops._attention import cpu_cache, cpu_masked
    from pc.triton_ops._attention.arguments import AttentionArgs
    from pc.triton_ops._attention.operator import attention_cpu

    case = dataclasses.replace(Case(lens=(500, 333), queries=(40, 60), scattered=True), **change)
    batch = build(case)
    monkeypatch.setattr(cpu_cache, "GATHER_BYTES", 3 * 16 * 2 * 64 * 4)
    monkeypatch.setattr(cpu_masked, "MAX_SCORES", 7 * 48 * 4)
    calls = []
    read = cpu_cache.Cache.read
    monkeypatch.setattr(cpu_cache.Cache, "read", lambda self, blocks: calls.append(len(blocks)) or read(self, blocks))
    call = AttentionArgs(*batch.tensors, batch.scale, batch.positions, **batch.options)
    check(build(case), *attention_cpu(call))
    assert sum(calls) <= 32 + 21, "each block is read once"
    assert max(calls) == 3


def test_recomputed_blocks_equal_full_prefill(device):
    """Tokens of evicted blocks, computed again at their positions, get the rows of a whole prefill."""
    case = Case(lens=(130,), queries=(130,), block_size=16, seed=2)
    batch = build(case).to(device)
    whole = pc.paged_attention(*batch.tensors, batch.scale)
    missing = [*range(32, 48), *range(80, 96), 129]
    positions = torch.tensor(missing, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, len(missing)], dtype=torch.int32, device=device)
    again = pc.sparse_gap_attention(batch.query[missing], *batch.tensors[1:5], bounds, positions, batch.scale)
    assert (again - whole[missing]).abs().max() < 1e-6


def test_gap_matches_compaction(device):
    """Whole absent blocks before every query, without a window, give the same as dropping these blocks."""
    case = Case(lens=(320,), queries=(1,), block_size=64)
    batch = build(case).to(device)
    holes, kept = batch.block_tables.clone(), batch.block_tables[:, [0, 3, 4]].contiguous()
    holes[:, 1:3] = -1
    query, key, value, _, lens, starts = batch.tensors
    with_holes = pc.sparse_gap_attention(query, key, value, holes, lens, starts, None, batch.scale)
    compacted = pc.paged_attention(query, key, value, kept, lens - 128, starts, batch.scale)
    assert torch.allclose(with_holes, compacted, atol=1e-6)


def test_nan_between_far_windows_is_not_read(device):
    """A tile between two distant queries has keys of neither."""
    batch = build(Case(lens=(128,), queries=(2,), window=8)).to(device)
    positions = torch.tensor([40, 62], dtype=torch.int32, device=device)
    block, offset = batch.block_tables[0, 3].long(), torch.arange(0, 6)
    expected = pc.sparse_gap_attention(*batch.tensors, positions, batch.scale, 8)
    batch.key_cache[block, offset], batch.value_cache[block, offset] = float("nan"), float("nan")
    assert torch.equal(pc.sparse_gap_attention(*batch.tensors, positions, batch.scale, 8), expected)


@counts_work
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_work_is_that_of_live_tiles(window, block_size):
    """A decode reads the present keys in its range, and multiplies their tiles."""
    case = Case(lens=(2000,), queries=(1,), heads=(1, 1), head_dim=16, block_size=block_size, holes=0.9, window=window)
    for seed in range(3):
        batch = build(Case(**{**case.__dict__, "seed": seed}))
        present = torch.zeros(32 * 64, dtype=torch.bool)
        present[:2000] = batch.block_tables[0][torch.arange(2000) // block_size] >= 0
        keys, tiles = present.clone(), present.view(32, 64).any(1)
        if window:
            keys[: 2000 - window] = False
            tiles[: (2000 - window) // 64] = False
        with counted_work(batch.key_cache) as work:
            _call(batch)
        assert work.read == int(keys.sum())
        assert work.multiplied == 64 * int(tiles.sum())


@counts_work
def test_work_of_scattered_queries():
    """The work of distant queries with a window depends on their windows, not on the span between them."""
    batch = build(Case(lens=(4000,), queries=(4,), heads=(1, 1), head_dim=16, window=64))
    positions = torch.tensor([127, 1023, 1024 + 63, 3999], dtype=torch.int32)
    with counted_work(batch.key_cache) as work:
        pc.sparse_gap_attention(*batch.tensors, positions, batch.scale, 64)
    assert work.read == 4 * 64
    assert work.multiplied == 64 * (1 + 2 + 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: p.long(), TypeError, "query_positions: got int64"),
        (lambda p: p[:-1], ValueError, "query_positions: got 6 elements, needs 7, one per row"),
        (lambda p: p.flip(0), ValueError, "query_positions: got .*needs positions that ascend"),
        (lambda p: p - 1000, ValueError, "query_positions: got"),
    ],
)
def test_bad_positions(change, error, message):
    batch = build(Case(lens=(40, 30), queries=(3, 4), scattered=True))
    with pytest.raises(error, match=message):
        pc.sparse_gap_attention(*batch.tensors, change(batch.positions), batch.scale)


@pytest.mark.gpu
def test_numerics_on_the_device(device):
    case = Case(lens=(5000, 2000), queries=(300, 7), heads=(8, 2), head_dim=128, dtype=BF16, scattered=True, holes=0.5)
    check(build(case), *_call(build(case).to(device)))
