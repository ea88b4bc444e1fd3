"""pc.sparse_latent_attention: queries anywhere, blocks that each of them chose, windows, over latent rows."""

from __future__ import annotations

import functools

import pytest
import torch
from attention_cases import Case, build, check

import pc

BF16, F16 = torch.bfloat16, torch.float16
Latent = functools.partial(Case, heads=(4, 1), head_dim=80, value_dim=64, latent=True)
CASES = [
    Latent(lens=(130, 33), queries=(2, 5), top_k=5, holes=0.2),
    Latent(lens=(40, 77, 130), queries=(12, 20, 33), holes=0.4, scattered=True, dtype=F16),
    Latent(lens=(200, 90), queries=(1, 20), window=40, num_sink_tokens=3),
    Latent(lens=(200, 90), queries=(9, 20), window=12, num_sink_tokens=3, scattered=True, padding=2),
    Latent(lens=(130,), queries=(3,), top_k=40, block_size=1, heads=(40, 1), dtype=BF16),
    Latent(lens=(90, 40), queries=(1, 9), top_k=3, cache_dtype=torch.int8, dtype=BF16, scattered=True, window=30),
    Latent(lens=(70, 0), queries=(1, 0), top_k=2, softcap=5.0, bounds=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numerics(case, device):
    batch = build(case).to(device)
    given = (*batch.tensors, batch.positions, batch.scale, case.value_dim, case.window, case.num_sink_tokens)
    out, lse = pc.sparse_latent_attention_with_lse(*given, **batch.options)
    check(build(case), out, lse)
    assert torch.equal(out, pc.sparse_latent_attention(*given, **batch.options))


def test_without_its_options_it_is_latent_attention(device):
    batch = build(Latent(lens=(70, 20), queries=(1, 9))).to(device)
    plain = pc.latent_attention(*batch.tensors, batch.scale, 64)
    assert torch.equal(pc.sparse_latent_attention(*batch.tensors, None, batch.scale, 64), plain)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": -1}, "window: got -1, needs 0 or a positive number"),
        ({"query_blocks": torch.zeros(6, 4, 2, dtype=torch.int32)}, r"query_blocks: got .*needs \[6, 1, top_k\]"),
        ({"query_blocks": torch.full((6, 1, 1), 7, dtype=torch.int32)}, "query_blocks: got block 7 for query 0"),
        ({"query_positions": torch.zeros(5, dtype=torch.int32)}, "query_positions: got 5 elements, needs 6"),
        ({"block_tables": torch.zeros(2, 4, 8, dtype=torch.int32)}, "block_tables: got .*needs 1 tables a sequence"),
    ],
)
def test_bad_input(given, message):
    batch = build(Latent(lens=(100, 40), queries=(1, 5)))
    names = ("query", "cache", "block_tables", "seq_lens", "query_start_loc")
    arguments = dict(zip(names, batch.tensors, strict=True)) | {"query_positions": None, "scale": 1.0, "value_dim": 64}
    with pytest.raises(ValueError, match=message):
        pc.sparse_latent_attention(**(arguments | given))
