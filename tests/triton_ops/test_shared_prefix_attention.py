"""pc.shared_prefix_attention: the same as paged attention, with the prefix read once."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from attention_cases import Case, attend, build, check, plan_of
from counted import counted_work, counts_work

# `pc.shared_prefix_attention` is the function.
shared_prefix = importlib.import_module("pc.triton_ops.shared_prefix_attention")

OP = "shared_prefix_attention"


@pytest.mark.interpreter
def test_what_layers_share_is_made_once_a_step(device, monkeypatch):
    """The first layer computes positions and the prefix's plan; a new plan needs new ones, in place for a graph."""
    made, fill = [], shared_prefix._Prefix.fill
    monkeypatch.setattr(shared_prefix._Prefix, "fill", lambda self, *args: made.append(self) or fill(self, *args))
    case = Case(lens=(200, 150), queries=(1, 3), heads=(1, 1), head_dim=16, shared=4)
    batch, plan = build(case).to(device), None

    def step(lens):
        nonlocal plan
        batch.case = dataclasses.replace(case, lens=lens)
        batch.seq_lens.copy_(torch.tensor(lens))
        plan = plan_of(batch, out=plan)
        for _ in range(2):
            check(batch.to(torch.device("cpu")), *attend(batch, OP, plan=plan))

    step((200, 150))
    assert len(made) == 1
    step((190, 140))
    assert len(made) == 2
    assert made[1] is not made[0]
    made[1].is_captured = True
    positions = made[1].batch["query_positions"]
    step((180, 130))
    assert made[2] is made[1]
    assert made[2].batch["query_positions"] is positions
    assert positions[: sum(case.queries)].tolist() == [179, 127, 128, 129]
    attend(batch, OP)
    assert len(made) == 4, "without a plan, in every layer"


@pytest.mark.parametrize(
    "case",
    [
        Case(lens=(640, 700, 513), queries=(1, 4, 1), sinks=True, padding=2, shared=32),
        Case(lens=(600, 512, 530), queries=(1, 0, 8), dtype=torch.bfloat16, shared=32),
        Case(lens=(513, 512, 512), queries=(1, 1, 1), shared=32),
        Case(lens=(530, 520, 600), queries=(3, 0, 8), causal=False, cache_dtype=torch.int8, shared=32),
        Case(lens=(530, 520, 600), queries=(0, 0, 0), shared=32),
        Case(lens=(600, 512, 530), queries=(1, 12, 8), shared=32),
    ],
    ids=str,
)
def test_queries_of_all_sequences_attend_to_the_prefix_together(case: Case) -> None:
    """On a CPU too, if that spares the other sequences at least 1,024 tokens of keys."""
    batch = build(case)
    check(batch, *attend(batch, OP))


@counts_work
def test_prefix_is_read_once():
    batch = build(Case(lens=(640, 650, 660, 670), queries=(1, 1, 1, 1), heads=(1, 1), block_size=64, shared=10))
    with counted_work(batch.key_cache) as work:
        attend(batch, OP)
    assert work.read == 640 + 0 + 10 + 20 + 30
    assert work.multiplied == 64 * (10 + 0 + 1 + 1 + 1)
    with counted_work(batch.key_cache) as work:
        attend(batch)
    assert work.read == 640 + 650 + 660 + 670
    assert work.multiplied == 64 * (10 + 11 + 11 + 11)
