"""pc.warmup compiles what serving will launch."""

from __future__ import annotations

import pytest
import torch

import pc


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5, "sinks": True, "alibi": True, "softcap": 2.0}, {"cache_dtype": torch.int8, "gaps": True}],
)
def test_runs_every_regime(options, device):
    pc.warmup(4, 2, 32, dtype=torch.float32, device=device, **options)


@pytest.mark.gpu
def test_serving_compiles_nothing_more(device):
    from pc.triton_ops._attention.kernel import _attention_kernel

    pc.warmup(8, 2, 64, dtype=torch.bfloat16, device=device)
    compiled = {index: len(cache[0]) for index, cache in _attention_kernel.device_caches.items()}
    query = torch.randn(2, 8, 64, dtype=torch.bfloat16, device=device)
    cache = torch.randn(100, 16, 2, 64, dtype=torch.bfloat16, device=device)
    tables = torch.arange(60, dtype=torch.int32, device=device).view(2, 30)
    lens = torch.tensor([400, 17], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    pc.paged_attention(query, cache, cache, tables, lens, starts, 0.125, max_query_len=1)
    assert {index: len(cache[0]) for index, cache in _attention_kernel.device_caches.items()} == compiled
