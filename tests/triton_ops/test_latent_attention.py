"""pc.latent_attention: PyTorch on the CPU, kernels in the interpreter or on a GPU, through one dispatcher."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from attention_cases import Case, build, check

import pc
from pc.flash_attn import flash_attn_varlen_func

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
Latent = functools.partial(Case, heads=(4, 1), head_dim=80, value_dim=64, latent=True)
CASES = [
    Latent(lens=(70, 20), queries=(1, 9)),
    Latent(),
    Latent(lens=(), queries=()),
    Latent(lens=(), queries=(), padding=2),
    Latent(lens=(0, 5, 0, 70), queries=(0, 0, 1, 1), padding=3),
    Latent(lens=(0, 0), queries=(1, 30), bounds=True),
    Latent(lens=(130, 70, 9), queries=(1, 1, 1), heads=(16, 1), head_dim=576, value_dim=512, dtype=BF16),
    Latent(lens=(70, 40), queries=(4, 2), heads=(16, 1), head_dim=576, value_dim=512, dtype=F16, block_size=64),
    Latent(lens=(70,), queries=(1,), heads=(128, 1), head_dim=160, value_dim=128, dtype=BF16),
    Latent(lens=(150, 33), queries=(150, 1), heads=(1, 1)),
    Latent(lens=(129, 300), queries=(8, 9), heads=(7, 1), head_dim=48, value_dim=16),
    Latent(lens=(40, 70), queries=(9, 1), head_dim=1024, value_dim=512, dtype=F16),
    Latent(lens=(40, 20), queries=(1, 10), head_dim=1024, value_dim=1008, heads=(2, 1)),
    Latent(lens=(40, 20), queries=(1, 10), head_dim=1024, value_dim=256, heads=(2, 1), dtype=F16),
    Latent(lens=(40, 20), queries=(1, 10), head_dim=640, value_dim=512, heads=(32, 1), dtype=BF16),
    Latent(lens=(90, 40), queries=(1, 20), head_dim=304, value_dim=208, dtype=BF16, block_size=5),
    Latent(lens=(1000,), queries=(1,), heads=(8, 1), bounds=True),
    Latent(lens=(26, 9), queries=(20, 1), causal=False),
    Latent(lens=(200, 90), queries=(1, 20), softcap=5.0),
    Latent(lens=(500, 300), queries=(1, 20), holes=0.5, dtype=F16),
    Latent(lens=(500, 300), queries=(1, 20), holes=1.0),
    Latent(lens=(200, 90), queries=(1, 20), cache_dtype=E4M3, dtype=BF16),
    Latent(lens=(200, 90), queries=(3, 20), cache_dtype=E4M3, dtype=F16, head_dim=96),
    Latent(lens=(200, 90), queries=(1, 20), cache_dtype=torch.int8, dtype=BF16),
    Latent(lens=(200, 90), queries=(1, 20), batch_invariant=True, padding=1),
    Latent(lens=(5000, 70), queries=(1, 1), heads=(2, 1), head_dim=32, value_dim=16, block_size=64),
    Latent(lens=(70,), queries=(1,), heads=(40, 1), dtype=BF16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numerics(case, device):
    batch = build(case).to(device)
    out = pc.latent_attention(*batch.tensors, batch.scale, case.value_dim, **batch.options)
    out_too, lse = pc.latent_attention_with_lse(*batch.tensors, batch.scale, case.value_dim, **batch.options)
    check(build(case), out, lse)
    assert torch.equal(out, out_too)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scale_of_any_sign(scale, device):
    batch, expected = (
        build(Latent(lens=(150, 90), queries=(1, 20))).to(device),
        build(Latent(lens=(150, 90), queries=(1, 20))),
    )
    expected.scale = scale
    check(expected, *pc.latent_attention_with_lse(*batch.tensors, scale, 64))


@pytest.mark.parametrize("layout", ["four dimensions", "columns of a wider cache", "wider blocks", "query", "tables"])
def test_strides(layout, device):
    batch = build(Latent(lens=(100, 40), queries=(1, 20))).to(device)
    query, cache, tables, *rest = batch.tensors
    if layout == "four dimensions":
        cache = cache.unsqueeze(2)
    elif layout == "columns of a wider cache":
        cache = torch.cat([cache, cache], dim=2)[..., :80]
    elif layout == "wider blocks":
        cache = torch.cat([cache, cache], dim=1)[:, :16]
    elif layout == "query":
        query = torch.cat([query, query], dim=2)[..., :80]
    else:
        tables = torch.cat([tables, tables], dim=1)[:, : tables.shape[1]]
    check(build(batch.case), pc.latent_attention(query, cache, tables, *rest, batch.scale, 64))


def test_a_plan_serves_every_layer(device):
    batch = build(Latent(lens=(1000, 300), queries=(1, 3))).to(device)
    plan = pc.attention_plan(*batch.tensors[2:], 16, num_kv_heads=1)
    for _ in range(2):
        check(build(batch.case), pc.latent_attention(*batch.tensors, batch.scale, 64, plan=plan))


def test_parts_of_a_context_merge_to_the_whole(device):
    """A prefill attends to the cached tokens and to its own tokens in two calls."""
    batch = build(Latent(lens=(160,), queries=(10,))).to(device)
    query, cache, tables, lens, starts = batch.tensors
    holes = [tables.clone(), tables.clone()]
    holes[0][:, 4:10], holes[1][:, :4] = -1, -1
    first, second = (pc.latent_attention_with_lse(query, cache, t, lens, starts, batch.scale, 64) for t in holes)
    check(build(batch.case), *pc.merge_attention(*first, *second))


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


def test_export_and_compile(device):
    torch._dynamo.reset()
    batch = build(Latent(lens=(20, 9), queries=(1, 9))).to(device)
    expected = pc.latent_attention(*batch.tensors, 0.125, 64)
    compiled = torch.compile(
        lambda *given: pc.latent_attention(*given, 0.125, 64) + 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    assert torch.equal(compiled(*batch.tensors), expected + 1)

    class Layer(torch.nn.Module):
        def forward(self, *given):
            return pc.latent_attention(*given, 0.125, 64)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = ({0: tokens}, None, None, None, None)
    exported = torch.export.export(Layer(), batch.tensors, dynamic_shapes=(shapes,))
    assert torch.equal(exported.module()(*batch.tensors), expected)


BAD = {
    "query of another width": (
        {"query": torch.zeros(6, 4, 96)},
        ValueError,
        "cache: got head_dim 80, needs head_dim 96 of query",
    ),
    "query too wide": ({"query": torch.zeros(6, 4, 1040)}, ValueError, "query: got head_dim 1040, needs 1 to 1024"),
    "query of integers": ({"query": torch.zeros(6, 4, 80, dtype=torch.int32)}, TypeError, "query: got int32"),
    "query with a gradient": (
        {"query": torch.zeros(6, 4, 80, requires_grad=True)},
        RuntimeError,
        "query: got a tensor that requires grad",
    ),
    "cache of heads": (
        {"cache": torch.zeros(9, 16, 2, 80)},
        ValueError,
        r"cache: got shape \[9, 16, 2, 80\], needs \[num_blocks",
    ),
    "cache of two dimensions": ({"cache": torch.zeros(9, 80)}, ValueError, "cache: got shape"),
    "cache of another dtype": (
        {"cache": torch.zeros(20, 16, 80, dtype=F16)},
        TypeError,
        "cache: got float16 .*needs dtype float32 or",
    ),
    "cache turned": ({"cache": torch.zeros(20, 80, 16).transpose(1, 2)}, ValueError, "cache: got strides"),
    "cache with a gradient": (
        {"cache": torch.zeros(20, 16, 80, requires_grad=True)},
        RuntimeError,
        "cache: got a tensor that requires grad",
    ),
    "odd width": (
        {"query": torch.zeros(6, 4, 72), "cache": torch.zeros(20, 16, 72)},
        ValueError,
        "cache: got head_dim 72, needs head_dim 72 of query, a multiple of 16",
    ),
    "values as wide as keys": (
        {"value_dim": 80},
        ValueError,
        "value_dim: got 80, needs a multiple of 16 below head_dim 80 of cache",
    ),
    "values of an odd width": ({"value_dim": 40}, ValueError, "value_dim: got 40"),
    "no values": ({"value_dim": 0}, ValueError, "value_dim: got 0"),
    "fewer than no values": ({"value_dim": -16}, ValueError, "value_dim: got -16"),
    "a scale of rows as they are": ({"k_scale": torch.ones(1)}, ValueError, "k_scale: got .*needs None"),
    "codes without a scale": ({"cache": torch.zeros(20, 16, 80, dtype=torch.int8)}, ValueError, "k_scale: got None"),
    "a softcap below 0": ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
    "a plan of other tables": ({"plan": torch.zeros(3, dtype=torch.int32)}, ValueError, "plan: got 3 elements"),
    "a bound too low": ({"max_query_len": 2}, ValueError, "max_query_len: got 2, needs at least 5"),
    "a table per head": (
        {"block_tables": torch.zeros(2, 4, 8, dtype=torch.int32)},
        ValueError,
        "block_tables: got shape",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    batch = build(Latent(lens=(100, 40), queries=(1, 5)))
    names = ("query", "cache", "block_tables", "seq_lens", "query_start_loc")
    change, error, message = BAD[name]
    given = dict(zip(names, batch.tensors, strict=True)) | {"scale": batch.scale, "value_dim": 64} | change
    with pytest.raises(error, match=message):
        pc.latent_attention(**given)
