"""pc.sparse_gap_attention with query_blocks: every query and KV head has a list of blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import Case, attended, build, check
from counted import counted_work, counts_work
from graph_double import TapeCapturer

import pc

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
CASES = [
    Case(lens=(300, 0, 90), queries=(1, 0, 5), top_k=4, padding=2, sinks=True),
    Case(lens=(300, 90), queries=(20, 9), top_k=6, heads=(6, 3), holes=0.2, dtype=F16),
    Case(lens=(300, 90), queries=(12, 3), top_k=9, scattered=True, window=70, num_sink_tokens=20, block_size=5),
    Case(lens=(300, 90), queries=(9, 3), top_k=3, alibi=True, softcap=5.0, dtype=BF16, head_tables=True, holes=0.3),
    Case(lens=(900,), queries=(1,), top_k=40, cache_dtype=E4M3, dtype=BF16, head_dim=256, per_head_scales=True),
    Case(lens=(700, 90), queries=(2, 7), top_k=3, block_size=128, cache_dtype=INT8, heads=(20, 1), bounds=True),
    Case(lens=(300, 90), queries=(9, 3), top_k=5, causal=False, window=60, batch_invariant=True, value_dim=24),
    Case(lens=(), queries=(), top_k=3, padding=2),
    Case(lens=(90, 40), queries=(1, 35), top_k=4, tree=True, scattered=True, sinks=True, padding=1),
    Case(lens=(150,), queries=(9,), top_k=6, tree=True, scattered=True, alibi=True, dtype=F16, head_tables=True),
    Case(lens=(90,), queries=(12,), top_k=9, tree=True, window=40, num_sink_tokens=20, block_size=5, holes=0.2),
    Case(lens=(120,), queries=(7,), top_k=4, tree=True, causal=False, cache_dtype=E4M3, dtype=BF16, softcap=5.0),
]


def _call(batch, op=pc.sparse_gap_attention_with_lse, **options):
    case = batch.case
    arguments = (*batch.tensors, batch.positions, batch.scale, case.window, case.num_sink_tokens)
    return op(*arguments, **{**batch.options, **options})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numerics(case, device):
    batch = build(case).to(device)
    out, lse = _call(batch)
    check(build(case), out, lse)
    assert torch.equal(out, _call(batch, pc.sparse_gap_attention))


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
def test_queries_that_share_a_list(options, device):
    """Runs of equal lists are computed together on the CPU, and in a tile of queries."""
    batch = build(Case(lens=(300, 90), queries=(40, 9), top_k=5, seed=1))
    lists = batch.options["query_blocks"]
    for begin, end in ((0, 17), (17, 40), (41, 49)):
        lists[begin:end] = lists[begin]
    batch.key_cache.nan_to_num_()
    batch.value_cache.nan_to_num_()
    batch.case = dataclasses.replace(batch.case, **options)
    batch.options |= options
    moved = batch.to(device)
    check(batch, *_call(moved))


def test_all_blocks_are_plain_attention(device):
    batch = build(Case(lens=(300, 90), queries=(20, 1))).to(device)
    every = torch.full((21, 2, 20), -1, dtype=torch.int32, device=device)
    every[:20, :, :19] = torch.arange(19, dtype=torch.int32, device=device)
    every[20:, :, :6] = torch.arange(6, dtype=torch.int32, device=device)
    expected = pc.paged_attention(*batch.tensors, batch.scale)
    assert torch.allclose(_call(batch, pc.sparse_gap_attention, query_blocks=every), expected, atol=1e-6)


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
        _call(batch)
    assert work.read == keys
    # A step has two blocks, so a split with an odd number multiplies one in vain. A tile has at most two splits.
    assert 32 * blocks <= work.multiplied <= 32 * (blocks + 2 * tiles)


@pytest.mark.interpreter
def test_batch_invariant_rows(device):
    """A row's bits do not depend on the queries beside it."""
    case = Case(lens=(300,), queries=(12,), top_k=6, batch_invariant=True)
    batch = build(case).to(device)
    whole = _call(batch, pc.sparse_gap_attention)
    positions = torch.arange(288, 300, dtype=torch.int32, device=device)
    some = torch.tensor([2, 7, 11], device=device)
    batch.query, batch.positions = batch.query[some], positions[some]
    batch.options["query_blocks"] = batch.options["query_blocks"][some]
    batch.query_start_loc = torch.tensor([0, 3], dtype=torch.int32, device=device)
    assert torch.equal(_call(batch, pc.sparse_gap_attention), whole[some])


def test_replayed_with_other_lists_and_trees(device):
    """The graph is captured once, and uses the lists, masks, depths and lengths at its replay."""
    case = Case(lens=(90, 60), queries=(5, 3), heads=(4, 2), head_dim=16, top_k=3, tree=True, scattered=True)
    batch = build(case).to(device)
    replay = TapeCapturer(device).capture(lambda: _call(batch, pc.sparse_gap_attention))
    other = build(dataclasses.replace(case, seed=1, lens=(81, 75)))
    for name in ("query", "key_cache", "value_cache", "block_tables", "seq_lens", "positions"):
        getattr(batch, name).copy_(getattr(other, name))
    for name in ("query_blocks", "tree_mask"):
        batch.options[name].copy_(other.options[name])
    check(other, replay())


def _with(lists, *row):
    changed = lists.clone()
    changed[1, 1] = torch.tensor(row, dtype=torch.int32)
    return changed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.long(), TypeError, "query_blocks: got int64"),
        (lambda t: t[:-1], ValueError, r"query_blocks: got shape \[6, 2, 3\], needs \[7, 2, top_k\]"),
        (lambda t: t[:, :1], ValueError, r"query_blocks: got shape \[7, 1, 3\], needs \[7, 2, top_k\]"),
        (lambda t: t[:, 0], ValueError, "query_blocks: got shape .*num_kv_heads, top_k"),
        (lambda t: t.mT.contiguous().mT, ValueError, "query_blocks: got strides"),
        (lambda t: _with(t, 0, 3, -1), ValueError, "query_blocks: got block 3 for query 1, KV head 1, needs -1 to 2"),
        (lambda t: _with(t, 0, -2, -1), ValueError, "query_blocks: got block -2 for query 1, KV head 1"),
        (lambda t: _with(t, 1, 0, -1), ValueError, r"query_blocks: got \[1, 0, -1\] for query 1, KV head 1"),
        (lambda t: _with(t, 1, 1, -1), ValueError, r"query_blocks: got \[1, 1, -1\] for query 1, KV head 1"),
        (lambda t: _with(t, 0, -1, 1), ValueError, "needs blocks that ascend, then -1"),
    ],
)
def test_bad_lists(change, error, message):
    batch = build(Case(lens=(40, 33), queries=(3, 4), top_k=3))
    with pytest.raises(error, match=message):
        _call(batch, query_blocks=change(batch.options["query_blocks"]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change", [{}, {"window": 300, "head_tables": True}, {"head_dim": 256, "alibi": True}], ids=str
)
def test_numerics_on_the_device(change, device):
    case = Case(lens=(5000, 2000), queries=(1, 70), heads=(8, 2), head_dim=128, dtype=BF16, top_k=16, block_size=64)
    case = dataclasses.replace(case, **change)
    check(build(case), *_call(build(case).to(device)))
