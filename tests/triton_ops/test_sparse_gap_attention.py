"""pc.sparse_gap_attention: scattered queries, holes, tables of each head, lists of blocks, and trees."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from attention_cases import Case, attend, attended, build, check, plan_of, random_case, with_random_lengths
from counted import counted_work, counts_work
from graph_double import TapeCapturer

import pc
from pc.triton_ops._attention.constants import prefill_tiles
from pc.triton_ops._core.runtime import INTERPRET

OP = "sparse_gap_attention"
QUICK_SEEDS = 4 if INTERPRET else 2
HEADED = Case(lens=(300, 90), queries=(1, 40), block_size=8, heads=(6, 3), holes=0.5, head_tables=True)


def result(batch, **changes):
    """Return the operator's result without the log-sum-exp."""
    return attend(batch, OP, with_lse=False, **changes)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= QUICK_SEEDS)) for n in range(40)])
def test_all_options_together(seed, device):
    """Random options and batches. PyTorch is fast, so that a seed has ten of them."""
    rand = random.Random(seed)
    for _ in range(1 if INTERPRET else 10):
        case = random_case(rand)
        batch = build(with_random_lengths(case, rand, 500_000 if device.type == "cpu" else 2_000_000)).to(device)
        options = {"plan": plan_of(batch)} if rand.random() < 0.5 else {}
        check(build(batch.case), *attend(batch, OP, **options))


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
    assert max(calls) == 2, "half of what a gather may hold"


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
            attend(batch, OP)
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


@pytest.mark.parametrize("place", ["expanded", "columns", "heads", "sequences", "one head"])
def test_layouts_of_tables(place, device):
    case = HEADED
    if place == "one head":
        case = dataclasses.replace(case, heads=(4, 1))
    batch = build(case).to(device)
    tables = batch.block_tables
    wide = tables.new_full([2 * n for n in tables.shape], -7)
    if place == "columns":
        wide[:2, : tables.shape[1], : tables.shape[2]] = tables
        batch.block_tables = wide[:2, : tables.shape[1], : tables.shape[2]]
    elif place == "heads":
        wide[:2, ::2, : tables.shape[2]] = tables
        batch.block_tables = wide[:2, ::2, : tables.shape[2]]
    elif place == "sequences":
        batch.block_tables = tables.transpose(0, 1).contiguous().transpose(0, 1)
    elif place == "expanded":
        batch.block_tables = tables[:, :1].expand_as(tables)
        batch.key_cache.nan_to_num_()
        batch.value_cache.nan_to_num_()
    out, lse = attend(batch, OP)
    check(batch.to(torch.device("cpu")), out, lse)


def test_another_heads_memory_is_not_read(device):
    """A block that one head holds is NaN in every other head's part."""
    batch = build(Case(lens=(300, 90), queries=(1, 20), heads=(6, 3), head_tables=True, holes=0.5)).to(device)
    for cache in (batch.key_cache, batch.value_cache):
        assert cache.isnan().any()
    assert not result(batch).isnan().any()


@counts_work
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("q_len", [1, 3, 70])
def test_work_is_that_of_each_heads_live_tiles(q_len, window):
    """Present keys that a tile of queries attends to, and their tiles of 64, are counted for each head."""
    case = Case(lens=(1000, 700), queries=(q_len, 1), heads=(3, 3), head_dim=16, block_size=32, window=window)
    case = dataclasses.replace(case, holes=0.8, head_tables=True)
    batch, whole = build(case), build(dataclasses.replace(case, holes=0.0))
    tiles = prefill_tiles("interpreter", case.head_dim, 4, False)
    read, multiplied = 0, 0
    for i, length in enumerate(case.lens):
        present = batch.block_tables[i][:, torch.arange(length) // case.block_size] >= 0
        for tile in attended(whole, i).split(tiles.block_m, 1):
            both = (present, tile.any(1))
            live, attends = (torch.nn.functional.pad(x, (0, -length % 64)).view(3, -1, 64).any(2) for x in both)
            keys = 64 * (live & attends).sum(1)
            if tile.shape[1] > 8:
                keys = keys.clamp(min=tiles.block_n)  # without a tile, a prefill runs one empty step
            read += int((present & tile.any(1)).sum())
            multiplied += int(keys.sum())
    with counted_work(batch.key_cache) as work:
        result(batch)
    assert work.read == read
    assert work.multiplied == multiplied


def test_a_far_block_number(device):
    """One head has a block with a byte offset beyond 2**31, in memory that is only partly backed."""
    far, size = 70_000, 128
    cache = torch.from_numpy(np.zeros((far + 1, size, 2, 64), dtype=np.float16)).to(device)
    cache[[far, 3]] = torch.randn(2, size, 2, 64, dtype=torch.float16, device=device)
    assert cache.numel() * 2 > 2**31
    query = torch.randn(1, 4, 64, dtype=torch.float16, device=device)
    lens, starts, tables, same = (
        torch.tensor(n, dtype=torch.int32, device=device)
        for n in ([2 * size], [0, 1], [[[far, -1], [-1, 3]]], [[[0, -1], [-1, 1]]])
    )
    out = pc.sparse_gap_attention(query, cache, cache, tables, lens, starts, None, 0.125)
    near = cache[[far, 3]]
    assert torch.equal(out, pc.sparse_gap_attention(query, near, near, same, lens, starts, None, 0.125))


def test_plan_refreshed_in_a_graph(device):
    """The graph is captured once, and replayed with other lengths and holes."""
    case = Case(lens=(300, 200), queries=(1, 1), heads=(6, 3), holes=0.4, head_tables=True)
    batch = build(case).to(device)
    plan = pc.attention_plan(*batch.tensors[3:], 16)

    def step():
        pc.attention_plan(*batch.tensors[3:], 16, out=plan)
        return pc.sparse_gap_attention(*batch.tensors, None, batch.scale, plan=plan)

    replay = TapeCapturer(device).capture(step)
    batch.seq_lens.copy_(torch.tensor([270, 130]))
    batch.block_tables[0, 1, :9] = -1
    batch.block_tables[1, :, 3:5] = batch.block_tables[1, :, 3:5].flip(-1)
    out = replay()
    check(dataclasses.replace(batch.to(torch.device("cpu")), case=dataclasses.replace(case, lens=(270, 130))), out)


@pytest.mark.parametrize("positions", [(40, 41), (64, 65), (320, 321)], ids=str)
def test_queries_behind_the_last_key_attend_to_each_once(positions, device):
    """They do not attend to the keys of the table's last block a second time."""
    batch = build(Case(lens=(32,), queries=(2,), head_tables=True)).to(device)
    query, key, value, tables, *lengths = batch.tensors
    tables = torch.nn.functional.pad(tables, (0, 2), value=-1)
    where = torch.tensor(positions, dtype=torch.int32, device=device)
    call = query, key, value, tables, *lengths, where, batch.scale
    every = pc.sparse_gap_attention(*call, causal=False)
    assert torch.allclose(pc.sparse_gap_attention(*call), every, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("change", ["none", "softcap", "one query differs", "own block left out"])
def test_queries_that_share_a_list(change, device):
    """Runs of equal lists are computed together on the CPU, and in a tile of queries."""
    batch = build(Case(lens=(300, 90), queries=(40, 9), top_k=5, seed=1))
    lists = batch.options["query_blocks"]
    for begin, end in ((0, 17), (17, 40), (41, 49)):
        lists[begin:end] = lists[begin]
    if change == "one query differs":
        lists[20, 1] = torch.tensor([0, 2, 5, 11, -1])
    elif change == "own block left out":
        lists[41:, 0] = torch.tensor([0, 1, 2, 3, -1])
    elif change == "softcap":
        batch.case = dataclasses.replace(batch.case, softcap=5.0)
        batch.options["softcap"] = 5.0
    for cache in (batch.key_cache, batch.value_cache):
        cache.nan_to_num_()
    check(batch, *attend(batch.to(device), OP))


@counts_work
@pytest.mark.parametrize("q_len", [1, 3, 21])
def test_keys_read_are_those_of_the_union(q_len):
    """A tile of four queries reads each key once that one of them attends to, and visits only their blocks."""
    case = Case(lens=(1000, 700), queries=(q_len, 1), heads=(8, 2), head_dim=16, block_size=32, top_k=6, holes=0.3)
    batch, keys, blocks, tiles = build(case), 0, 0, 0
    for i, length in enumerate(case.lens):
        live = torch.nn.functional.pad(attended(batch, i), (0, -length % 32)).view(2, -1, -(-length // 32), 32)
        for tile in live.split(min(q_len, 4), 1):
            keys += int(tile.any(1).sum())
            blocks += int(tile.any(3).any(1).sum())
            tiles += len(tile)
    with counted_work(batch.key_cache) as work:
        attend(batch, OP)
    assert work.read == keys
    # A step has two blocks, so a split with an odd number multiplies one in vain. A tile has at most two splits.
    assert 32 * blocks <= work.multiplied <= 32 * (blocks + 2 * tiles)


@pytest.mark.interpreter
def test_batch_invariant_rows(device):
    """A row's bits do not depend on the queries beside it."""
    case = Case(lens=(300,), queries=(12,), top_k=6, batch_invariant=True)
    batch = build(case).to(device)
    whole = result(batch)
    positions = torch.arange(288, 300, dtype=torch.int32, device=device)
    some = torch.tensor([2, 7, 11], device=device)
    batch.query, batch.positions = batch.query[some], positions[some]
    batch.options["query_blocks"] = batch.options["query_blocks"][some]
    batch.query_start_loc = torch.tensor([0, 3], dtype=torch.int32, device=device)
    assert torch.equal(result(batch), whole[some])


def test_replayed_with_other_lists_and_trees(device):
    """The graph is captured once, and uses the lists, masks, depths and lengths at its replay."""
    case = Case(lens=(90, 60), queries=(5, 3), heads=(4, 2), head_dim=16, top_k=3, tree=True, scattered=True)
    batch = build(case).to(device)
    replay = TapeCapturer(device).capture(lambda: result(batch))
    other = build(dataclasses.replace(case, seed=1, lens=(81, 75)))
    for name in ("query", "key_cache", "value_cache", "block_tables", "seq_lens", "positions"):
        getattr(batch, name).copy_(getattr(other, name))
    for name in ("query_blocks", "tree_mask"):
        batch.options[name].copy_(other.options[name])
    check(other, replay())


def test_a_sibling_is_not_an_ancestor():
    """Two tokens have the same depth, so the second must not see the first, unless nothing is causal."""
    batch = build(Case(lens=(40,), queries=(2,)))
    batch.options["tree_mask"] = torch.tensor([[1], [3]], dtype=torch.int32)
    batch.positions = torch.tensor([38, 38], dtype=torch.int32)
    with pytest.raises(ValueError, match="tree_mask: got bit 0 in query 1 of sequence 0"):
        attend(batch, OP)
    batch.options["causal"] = False
    assert result(batch).shape == batch.query.shape
