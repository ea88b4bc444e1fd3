"""pc.latent_attention: PyTorch on the CPU, kernels in the interpreter or on a GPU, through one dispatcher."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from attention_cases import Case, attend, build, check, plan_of

import pc
from pc.flash_attn import flash_attn_varlen_func

OP = "latent_attention"
Latent = functools.partial(Case, heads=(4, 1), head_dim=80, value_dim=64, latent=True)


def test_a_plan_serves_every_layer(device):
    batch = build(Latent(lens=(1000, 300), queries=(1, 3))).to(device)
    plan = plan_of(batch)
    for _ in range(2):
        check(build(batch.case), *attend(batch, OP, plan=plan))


def test_the_sparse_operator_without_its_options_is_the_same(device):
    batch = build(Latent(lens=(70, 20), queries=(1, 9))).to(device)
    assert torch.equal(*(attend(batch, op, with_lse=False) for op in (OP, "sparse_latent_attention")))


def test_a_chunk_behind_a_prefix_is_expanded_and_absorbed(device):
    """The chunk's own tokens are expanded to keys and values of heads; its prefix is read as it is cached."""
    torch.manual_seed(0)
    heads, latent, rope, nope, prefix, count, scale = 4, 64, 16, 32, 40, 24, 48**-0.5
    up_key, up_value = torch.randn(2, heads, latent, nope) / 8
    rows, queries = torch.randn(prefix + count, latent + rope), torch.randn(count, heads, nope + rope)

    def expanded(rows):
        keys = torch.einsum("tl,hln->thn", rows[:, :latent], up_key)
        keys = torch.cat([keys, rows[:, None, latent:].expand(-1, heads, -1)], 2)
        return keys, torch.einsum("tl,hln->thn", rows[:, :latent], up_value)

    keys, values = (x.double() for x in expanded(rows))
    scores = torch.einsum("qhd,thd->hqt", queries.double(), keys) * scale
    future = torch.ones(count, prefix + count, dtype=torch.bool).triu(prefix + 1)
    expected = torch.einsum("hqt,thd->qhd", scores.masked_fill(future, -math.inf).softmax(2), values)

    one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=device)  # noqa: E731
    cache = torch.zeros(5, 16, latent + rope).to(device)
    pc.scatter_slots(rows[:prefix].to(device), cache, torch.arange(prefix, device=device))
    absorbed = torch.cat([torch.einsum("qhn,hln->qhl", queries[..., :nope], up_key), queries[..., nope:]], 2)
    starts = one(0, count)
    before, before_lse = pc.latent_attention_with_lse(
        absorbed.to(device), cache, one(0, 1, 2)[None], one(prefix), starts, scale, latent, causal=False
    )
    before = torch.einsum("qhl,hln->qhn", before, up_value.to(device))
    own, own_lse, *_ = flash_attn_varlen_func(
        queries.to(device), *(x.to(device) for x in expanded(rows[prefix:])), starts, starts, count, count,
        softmax_scale=scale, causal=True, return_attn_probs=True,
    )  # fmt: skip
    merged, _ = pc.merge_attention(before.contiguous(), before_lse, own, own_lse.T.contiguous())
    assert torch.allclose(merged.cpu().double(), expected, atol=1e-5)


@pytest.mark.interpreter
def test_rows_are_as_in_any_other_batch(device):
    """With batch_invariant, rows are equal alone and among others, in decodes and in prefills."""
    batch = build(Latent(lens=(140, 90), queries=(1, 1), head_dim=32, value_dim=16)).to(device)
    query, cache, tables, lens, _ = batch.tensors
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    together = pc.latent_attention(*batch.tensors, batch.scale, 16, batch_invariant=True)
    alone = pc.latent_attention(query[1:], cache, tables[1:], lens[1:], starts, batch.scale, 16, batch_invariant=True)
    assert torch.equal(alone[0], together[1])
