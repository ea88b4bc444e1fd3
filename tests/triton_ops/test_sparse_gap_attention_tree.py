"""pc.sparse_gap_attention with a tree_mask: queries of the call attend to one another as bits say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import Case, build, check

import pc

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
CASES = [
    Case(lens=(300, 90, 40), queries=(40, 1, 40), tree=True, scattered=True),
    Case(lens=(300, 0, 70), queries=(7, 0, 3), tree=True, dtype=F16, padding=2, heads=(6, 3)),
    Case(lens=(700, 90), queries=(5, 33), tree=True, scattered=True, window=20, num_sink_tokens=3, holes=0.3),
    Case(lens=(300, 90), queries=(70, 3), tree=True, scattered=True, alibi=True, softcap=5.0, sinks=True, dtype=BF16),
    Case(lens=(300, 90), queries=(40, 3), tree=True, scattered=True, cache_dtype=E4M3, dtype=BF16, head_dim=256),
    Case(lens=(300, 90), queries=(12, 3), tree=True, head_tables=True, holes=0.4, window=30, causal=False),
    Case(lens=(600,), queries=(20,), tree=True, scattered=True, cache_dtype=INT8, bounds=True, block_size=64),
    Case(lens=(300, 90), queries=(40, 3), tree=True, scattered=True, batch_invariant=True, alibi=True, block_size=5),
]


def _call(batch, op=pc.sparse_gap_attention_with_lse, **options):
    case = batch.case
    arguments = (*batch.tensors, batch.positions, batch.scale, case.window, case.num_sink_tokens)
    return op(*arguments, **batch.options, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numerics(case, device):
    batch = build(case).to(device)
    out, lse = _call(batch)
    check(build(case), out, lse)
    assert torch.equal(out, _call(batch, pc.sparse_gap_attention))


def test_a_chain_is_causal(device):
    """Every token's ancestors are all tokens before it, as in paged_attention."""
    batch = build(Case(lens=(300, 90), queries=(40, 9))).to(device)
    rows = torch.cat([torch.arange(40), torch.arange(9)])
    masks = torch.tensor([[(1 << min(32, n + 1)) - 1, (1 << max(0, n - 31)) - 1] for n in rows.tolist()])
    batch.options["tree_mask"] = masks.to(device, torch.int64).to(torch.int32)
    chain = pc.paged_attention(*batch.tensors, batch.scale)
    assert torch.allclose(_call(batch, pc.sparse_gap_attention), chain, atol=1e-6)


def test_with_a_plan(device):
    case = CASES[2]
    batch = build(case).to(device)
    sinks = (case.causal, case.window, case.num_sink_tokens)
    plan = pc.attention_plan(*batch.tensors[3:], case.block_size, *sinks, batch.positions)
    check(build(case), *_call(batch, plan=plan))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: m.long(), TypeError, "tree_mask: got int64"),
        (lambda m: m[:-1], ValueError, r"tree_mask: got shape \[6, 2\], needs 7 rows"),
        (lambda m: m[:, :0], ValueError, r"tree_mask: got shape \[7, 0\]"),
        (lambda m: m[:, 0], ValueError, r"tree_mask: got shape \[7\], needs \[num_tokens, words\]"),
        (lambda m: m.t().contiguous().t(), ValueError, "tree_mask: got strides"),
        (lambda m: m | 4, ValueError, "tree_mask: got bit 2 in query 0 of sequence 0"),
        (lambda m: m | torch.tensor([0, 1], dtype=torch.int32), ValueError, "tree_mask: got bit 32 in query 0"),
    ],
)
def test_bad_masks(change, error, message):
    batch = build(Case(lens=(40, 30), queries=(3, 4), tree=True))
    batch.options["tree_mask"] = change(batch.options["tree_mask"])
    with pytest.raises(error, match=message):
        _call(batch)


def test_a_sibling_is_not_an_ancestor():
    """Two tokens have the same depth, so the second must not see the first, unless nothing is causal."""
    batch = build(Case(lens=(40,), queries=(2,)))
    batch.options["tree_mask"] = torch.tensor([[1], [3]], dtype=torch.int32)
    batch.positions = torch.tensor([38, 38], dtype=torch.int32)
    with pytest.raises(ValueError, match="tree_mask: got bit 0 in query 1 of sequence 0"):
        _call(batch)
    batch.options["causal"] = False
    assert _call(batch, pc.sparse_gap_attention).shape == batch.query.shape


def test_too_few_words():
    batch = build(Case(lens=(40,), queries=(33,), tree=True))
    batch.options["tree_mask"] = batch.options["tree_mask"][:, :1]
    with pytest.raises(ValueError, match="tree_mask: got 1 words, needs 2, 32 keys each"):
        _call(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{}, {"window": 300}, {"head_dim": 256, "alibi": True}], ids=str)
def test_numerics_on_the_device(change, device):
    case = Case(lens=(5000, 2000), queries=(64, 7), heads=(8, 2), head_dim=128, dtype=BF16, tree=True, scattered=True)
    case = dataclasses.replace(case, **change)
    check(build(case), *_call(build(case).to(device)))
