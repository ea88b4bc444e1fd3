"""pc.sparse_gap_attention with a block table per KV head."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_cases import Case, attended, build, check
from counted import counted_work, counts_work
from graph_double import TapeCapturer

import pc
from pc.triton_ops._attention.constants import prefill_tiles

CASE = Case(lens=(40, 20), queries=(1, 9), block_size=8, heads=(6, 3), holes=0.5, head_tables=True)
OPS = (torch.ops.pc.sparse_gap_attention, torch.ops.pc.sparse_gap_attention_with_lse)


def _arguments(batch):
    return (*batch.tensors, batch.positions, batch.scale, batch.case.window, batch.case.num_sink_tokens)


@pytest.mark.parametrize("queries", [(1, 2), (20, 9)], ids=str)
def test_equal_tables_are_one_table(queries, device):
    batch = build(Case(lens=(300, 90), queries=queries, holes=0.4)).to(device)
    query, key, value, tables, *lengths = batch.tensors
    shared = pc.sparse_gap_attention(query, key, value, tables, *lengths, None, batch.scale)
    own = tables[:, None].expand(-1, 2, -1)
    assert torch.allclose(
        pc.sparse_gap_attention(query, key, value, own, *lengths, None, batch.scale), shared, atol=1e-6
    )


@pytest.mark.parametrize("place", ["expanded", "columns", "heads", "sequences", "one head"])
def test_layouts_of_tables(place, device):
    case = dataclasses.replace(CASE, lens=(300, 90), queries=(1, 40))
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
    out, lse = pc.sparse_gap_attention_with_lse(*_arguments(batch))
    check(batch.to(torch.device("cpu")), out, lse)


def test_another_heads_memory_is_not_read(device):
    """A block that one head holds is NaN in every other head's part."""
    batch = build(Case(lens=(300, 90), queries=(1, 20), heads=(6, 3), head_tables=True, holes=0.5)).to(device)
    for cache in (batch.key_cache, batch.value_cache):
        assert cache.isnan().any()
    assert not pc.sparse_gap_attention(*_arguments(batch)).isnan().any()


@counts_work
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("q_len", [1, 3, 70])
def test_work_is_that_of_each_heads_live_tiles(q_len, window):
    """Present keys that a tile of queries attends to, and their tiles of 64, are counted for each head."""
    case = Case(lens=(1000, 700), queries=(q_len, 1), heads=(3, 3), head_dim=16, block_size=32, window=window)
    case = dataclasses.replace(case, holes=0.8, head_tables=True)
    batch, whole = build(case), build(dataclasses.replace(case, holes=0.0))
    tiles = prefill_tiles("interpreter", case.head_dim, 4, False, 1, case.block_size)
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
        pc.sparse_gap_attention(*_arguments(batch))
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


@pytest.mark.slow
def test_compile(device):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(query, key, value, tables, lens, starts, scale):
        plan = pc.attention_plan(tables, lens, starts, key.shape[1])
        return pc.sparse_gap_attention(query, key, value, tables, lens, starts, None, scale, plan=plan)

    for lens in ((40, 20), (70, 9)):
        batch = build(dataclasses.replace(CASE, lens=lens)).to(device)
        expected = pc.sparse_gap_attention(*batch.tensors, None, batch.scale)
        assert torch.equal(step(*batch.tensors, batch.scale), expected)


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t[:, :2], ValueError, r"block_tables: got shape \[2, 2, 6\], needs 3 tables a sequence"),
        (lambda t: t[:1], ValueError, "seq_lens: got 2 elements, needs 1, the rows of block_tables"),
        (lambda t: t.long(), TypeError, r"block_tables: got int64 \[2, 3, 6\] on cpu, needs dtype int32"),
        (lambda t: t[None], ValueError, r"block_tables: got shape .*\[num_seqs, num_kv_heads, max_blocks\]"),
        (lambda t: t.mT.contiguous().mT, ValueError, "block_tables: got strides"),
        (lambda t: t.clone().fill_(10**6), ValueError, "block_tables: got 1000000 in row 0, KV head 0, column 0"),
        (lambda t: t.clone().fill_(-2), ValueError, "block_tables: got -2 in row 0, KV head 0, column 0"),
    ],
)
def test_bad_tables(change, error, message):
    batch = build(CASE)
    batch.block_tables = change(batch.block_tables)
    with pytest.raises(error, match=message):
        pc.sparse_gap_attention(*_arguments(batch))


def test_other_operators_refuse_them():
    batch = build(CASE)
    for op, arguments in (
        (pc.paged_attention, ()),
        (pc.sliding_window_attention, (4,)),
    ):
        with pytest.raises(ValueError, match=r"needs .*a table per KV head goes to sparse_gap_attention"):
            op(*batch.tensors, batch.scale, *arguments)
    with pytest.raises(ValueError, match=r"needs .*a table per KV head goes to sparse_gap_attention"):
        pc.shared_prefix_attention(*batch.tensors, 1, batch.scale)
    with pytest.raises(ValueError, match="num_shared_blocks: got 1, needs 0"):
        pc.attention_plan(*batch.tensors[3:], 8, num_shared_blocks=1)


@pytest.mark.gpu
def test_numerics_on_the_device(device):
    case = Case(lens=(5000, 2000, 900), queries=(1, 300, 5), heads=(16, 4), head_dim=128, dtype=torch.bfloat16)
    for change in ({}, {"window": 300, "num_sink_tokens": 20}, {"head_dim": 256, "cache_dtype": torch.int8}):
        batch = build(dataclasses.replace(case, holes=0.5, head_tables=True, **change))
        out, lse = pc.sparse_gap_attention_with_lse(*_arguments(batch.to(device)), **batch.to(device).options)
        check(batch, out, lse)


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
