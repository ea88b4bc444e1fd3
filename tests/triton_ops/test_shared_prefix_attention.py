"""pc.shared_prefix_attention: the same as paged attention, with the prefix read once."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from attention_cases import Case, build, check
from counted import counted_work, counts_work

import pc

# `pc.shared_prefix_attention` is the function.
shared_prefix = importlib.import_module("pc.triton_ops.shared_prefix_attention")

CASES = [
    (Case(lens=(200, 150, 300), queries=(1, 9, 1), padding=2), 8),
    (Case(lens=(200, 150), queries=(1, 1), sinks=True, alibi=True), 4),
    (Case(lens=(200, 150), queries=(1, 12), dtype=torch.bfloat16), 8),
    (Case(lens=(200, 150), queries=(1, 1), softcap=3.0, batch_invariant=True), 8),
    (Case(lens=(200, 150), queries=(1, 1), cache_dtype=torch.int8), 8),
    (Case(lens=(64, 150), queries=(40, 100)), 4),
    (Case(lens=(64, 150), queries=(1, 1), causal=False), 4),
    (Case(lens=(64, 150), queries=(1, 1)), 0),
]


def _batch(case, shared):
    batch = build(case)
    batch.block_tables[:, :shared] = batch.block_tables[:1, :shared]
    return batch


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("case", "shared"), CASES, ids=[str(case) for case, _ in CASES])
def test_numerics(case, shared, planned, device):
    batch = _batch(case, shared).to(device)
    plan = None
    if planned:
        plan = pc.attention_plan(
            *batch.tensors[3:], 16, case.causal, num_shared_blocks=shared, batch_invariant=case.batch_invariant
        )
    out, lse = pc.shared_prefix_attention_with_lse(*batch.tensors, shared, batch.scale, plan=plan, **batch.options)
    check(_batch(case, shared), out, lse)
    assert torch.equal(out, pc.shared_prefix_attention(*batch.tensors, shared, batch.scale, plan=plan, **batch.options))


@pytest.mark.interpreter
def test_what_layers_share_is_made_once_a_step(device, monkeypatch):
    """The first layer computes positions and the prefix's plan; a new plan needs new ones, in place for a graph."""
    made, fill = [], shared_prefix._Prefix.fill
    monkeypatch.setattr(shared_prefix._Prefix, "fill", lambda self, *args: made.append(self) or fill(self, *args))
    case, shared = Case(lens=(200, 150), queries=(1, 3), heads=(1, 1), head_dim=16), 4
    batch, plan = _batch(case, shared).to(device), None

    def step(lens):
        nonlocal plan
        batch.case = dataclasses.replace(case, lens=lens)
        batch.seq_lens.copy_(torch.tensor(lens))
        plan = pc.attention_plan(*batch.tensors[3:], 16, num_shared_blocks=shared, out=plan)
        for _ in range(2):
            check(batch, *pc.shared_prefix_attention_with_lse(*batch.tensors, shared, batch.scale, plan=plan))

    step((200, 150))
    assert len(made) == 1
    step((190, 140))
    assert len(made) == 2
    assert made[1] is not made[0]
    made[1].is_captured = True
    positions = made[1].positions.data_ptr()
    step((180, 130))
    assert made[2] is made[1]
    assert made[2].positions.data_ptr() == positions
    assert made[2].positions[: sum(case.queries)].tolist() == [179, 127, 128, 129]
    pc.shared_prefix_attention(*batch.tensors, shared, batch.scale)
    assert len(made) == 4, "without a plan, in every layer"


@counts_work
def test_prefix_is_read_once():
    case, shared = Case(lens=(640, 650, 660, 670), queries=(1, 1, 1, 1), heads=(1, 1), block_size=64), 10
    batch = _batch(case, shared)
    with counted_work(batch.key_cache) as work:
        pc.shared_prefix_attention(*batch.tensors, shared, batch.scale)
    assert work.read == 640 + 0 + 10 + 20 + 30
    assert work.multiplied == 64 * (10 + 0 + 1 + 1 + 1)
    with counted_work(batch.key_cache) as work:
        pc.paged_attention(*batch.tensors, batch.scale)
    assert work.read == 640 + 650 + 660 + 670
    assert work.multiplied == 64 * (10 + 11 + 11 + 11)


def test_misuse():
    batch = _batch(Case(lens=(70, 90), queries=(1, 3)), 2)
    with pytest.raises(ValueError, match="num_shared_blocks: got 5, needs at most 4, since a sequence is 70 long"):
        pc.shared_prefix_attention(*batch.tensors, 5, batch.scale)
    with pytest.raises(ValueError, match="num_shared_blocks: got -1"):
        pc.shared_prefix_attention(*batch.tensors, -1, batch.scale)
    with pytest.raises(ValueError, match="block_tables: got rows that differ in shared columns"):
        pc.shared_prefix_attention(*batch.tensors, 3, batch.scale)
    plan = pc.attention_plan(*batch.tensors[3:], 16)
    with pytest.raises(ValueError, match="plan: got"):
        pc.shared_prefix_attention(*batch.tensors, 2, batch.scale, plan=plan)


@pytest.mark.gpu
def test_numerics_on_the_device(device):
    case = Case(lens=(5000, 4900, 4500), queries=(1, 1, 1), heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    batch = _batch(case, 256).to(device)
    check(_batch(case, 256), pc.shared_prefix_attention(*batch.tensors, 256, batch.scale))
