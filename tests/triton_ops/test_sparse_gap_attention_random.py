"""pc.sparse_gap_attention under all options together, drawn at random."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, build, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pc
from pc.triton_ops._core.runtime import INTERPRET

F16, BF16, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8


@st.composite
def cases(draw):
    n = draw(st.integers(0, 3))
    lens = tuple(draw(st.sampled_from([0, 1, 7, 64, 65, 130, 300])) for _ in range(n))
    scattered = draw(st.booleans())
    limit = [length if scattered or length else 3 for length in lens]
    queries = tuple(draw(st.integers(0, min(top, draw(st.sampled_from([1, 8, 9, 40]))))) for top in limit)
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    cache_dtype = draw(st.sampled_from([None, None, None, E4M3, INT8]))
    return Case(
        lens=lens,
        queries=queries,
        heads=(kv_heads * draw(st.sampled_from([1, 2, 5, 8])), kv_heads),
        head_dim=draw(st.sampled_from([16, 24, 64, 80, 96, 128])),
        block_size=draw(st.sampled_from([1, 5, 8, 16, 32, 48, 64, 100, 128, 192, 256, 528])),
        dtype=draw(st.sampled_from([torch.float32, F16, BF16])),
        cache_dtype=cache_dtype,
        per_head_scales=draw(st.booleans()),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 17, 64, 200])),
        num_sink_tokens=draw(st.sampled_from([0, 3, 100])),
        scattered=scattered,
        holes=draw(st.sampled_from([0.0, 0.0, 0.3, 0.8])),
        softcap=draw(st.sampled_from([0.0, 0.0, 5.0])),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        padding=draw(st.sampled_from([0, 0, 3])),
        head_major=draw(st.booleans()),
        batch_invariant=draw(st.sampled_from([False, False, True])),
        bounds=draw(st.booleans()),
        head_tables=draw(st.booleans()),
        tree=draw(st.sampled_from([False, False, True])),
        top_k=draw(st.sampled_from([0, 0, 1, 5])),
        seed=draw(st.integers(0, 1000)),
    )


def options_together(examples):
    """Return a decorator that runs a test with `examples` cases, the same each time."""
    return lambda test: settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )(given(case=cases())(test))


@options_together(8 if INTERPRET else 80)
def test_some_options_together(case, device):
    check_all_options(case, device)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRET, reason="on CPU tensors the quick test has as many")
@options_together(40)
def test_all_options_together(case, device):
    check_all_options(case, device)


def check_all_options(case, device):
    batch = build(case).to(device)
    plan = None
    if case.seed % 2:
        plan = pc.attention_plan(
            *batch.tensors[3:],
            case.block_size,
            case.causal,
            case.window,
            case.num_sink_tokens,
            batch.positions,
            num_kv_heads=case.heads[1],
            batch_invariant=case.batch_invariant,
        )
    found = pc.sparse_gap_attention_with_lse(
        *batch.tensors,
        batch.positions,
        batch.scale,
        case.window,
        case.num_sink_tokens,
        **batch.options,
        plan=plan,
    )
    check(build(case), *found)
