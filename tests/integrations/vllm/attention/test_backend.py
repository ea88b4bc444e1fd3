"""The attention layer alone: every layout of vLLM's cache, quantized caches, null blocks, shared prefixes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import flash_cases
import pytest
import torch

import pc

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 16, 8, 12
LENS, QUERIES = [19, 8, 33], [1, 8, 5]


def layouts():
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return list(KVCacheLayout)


def make_layer(**options):
    from pc.integrations.vllm.attention import PagedAttention

    return PagedAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, **options)


def make_cache(layout, dtype=torch.float32, num_layers=3, layer=1):
    """Return a layer's cache in a layout, logically [blocks, heads, block, keys and values], full of NaN or junk."""
    logical = (num_layers, BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
    memory = torch.full([logical[i] for i in layout.stride_order], 127 if dtype == torch.uint8 else float("nan"))
    return memory.to(dtype).permute([layout.stride_order.index(i) for i in range(5)])[layer]


def batch():
    """Return blocks in random order, sequences of different lengths, and all their tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = iter((torch.randperm(BLOCKS - 1, generator=generator) + 1).tolist())
    tables = torch.zeros(len(LENS), 5, dtype=torch.int32)
    for row, length in enumerate(LENS):
        for column in range(-(-length // BLOCK)):
            tables[row, column] = next(ids)
    kv = [torch.randn(length, 2, KV_HEADS, SIZE, generator=generator) for length in LENS]
    query = torch.randn(sum(QUERIES), HEADS, SIZE, generator=generator)
    return tables, kv, query


def slots_of(tables, row, length):
    at = torch.arange(length)
    return tables[row].long()[at // BLOCK] * BLOCK + at % BLOCK


def make_step(tables, **options):
    from pc.integrations.vllm.attention import PagedMetadata

    starts = torch.tensor([0, *itertools.accumulate(QUERIES)], dtype=torch.int32)
    options = {"block_tables": tables.masked_fill(tables == 0, -1), "max_seq_len": max(LENS), **options}
    return PagedMetadata(
        num_actual_tokens=sum(QUERIES),
        seq_lens=torch.tensor(LENS, dtype=torch.int32),
        query_start_loc=starts,
        max_query_len=max(QUERIES),
        **options,
    )


def run(attention, cache, step=None, layer=None):
    """Write all keys and values of the batch through the layer, and attend."""
    tables, kv, query = batch()
    for row, tokens in enumerate(kv):
        attention.do_kv_cache_update(layer, tokens[:, 0], tokens[:, 1], cache, slots_of(tables, row, len(tokens)))
    output = torch.full_like(query, float("nan"))
    return attention.forward(layer, query, None, None, cache, step or make_step(tables), output)


def expected(window=0, softcap=0.0, slopes=None, sinks=None, rounded=lambda values, kind: values):
    """Return attention by its formula in float64, for each sequence."""
    _, kv, query = batch()
    options = {"causal": True, "window_size": (window - 1, 0), "softcap": softcap, "s_aux": sinks}
    options["alibi_slopes"] = None if slopes is None else torch.tensor(slopes)
    rows = []
    for own, tokens in zip(query.split(QUERIES), kv, strict=True):
        keys, values = (rounded(tokens[:, i], i) for i in (0, 1))
        rows.append(flash_cases.attention(own, keys, values, **options)[0])
    return torch.cat(rows).float()


@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("window", [0, 6])
def test_every_layout(layout, window):
    found = run(make_layer(sliding_window=window or None), make_cache(layout))
    torch.testing.assert_close(found, expected(window))


def test_writes_stay_within_the_layer():
    """The layers next to it, and the null block, are unchanged."""
    for layout in layouts():
        logical = (3, BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
        memory = torch.full([logical[i] for i in layout.stride_order], 7.0)
        cache = memory.permute([layout.stride_order.index(i) for i in range(5)])
        run(make_layer(), cache[1])
        assert (cache[0] == 7).all()
        assert (cache[2] == 7).all()
        assert (cache[1, 0] == 7).all()


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 5.0},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding_window": 6},
        {"logits_soft_cap": 5.0, "sliding_window": 6},
    ],
    ids=lambda options: "+".join(options),
)
def test_options_of_layers(options):
    names = {"logits_soft_cap": "softcap", "alibi_slopes": "slopes", "sinks": "sinks", "sliding_window": "window"}
    found = run(make_layer(**options), make_cache(layouts()[0]))
    torch.testing.assert_close(found, expected(**{names[key]: value for key, value in options.items()}))


def test_float8_caches_with_scales():
    scales = torch.tensor(0.05), torch.tensor([0.02])

    def rounded(values, kind):
        return (values / scales[kind]).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales[kind]

    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    found = run(make_layer(kv_cache_dtype="fp8"), make_cache(layouts()[0], torch.uint8), layer=layer)
    torch.testing.assert_close(found, expected(rounded=rounded))


def test_null_blocks_are_holes():
    """A block behind the window is freed, and its table entry becomes the null block, which holds NaN."""
    tables, _, _ = batch()
    cache = make_cache(layouts()[0])
    attention = make_layer(sliding_window=6)
    run(attention, cache)
    dead = tables.clone()
    dead[2, :2] = 0
    step = make_step(dead)
    assert (step.block_tables[2, :2] == -1).all()
    torch.testing.assert_close(run(attention, cache, step), expected(6))


def test_rows_of_padding_are_zero_and_profiling_gives_zeros():
    tables, _, query = batch()
    attention, cache = make_layer(), make_cache(layouts()[0])
    run(attention, cache)
    step = make_step(tables)
    step.num_actual_tokens = sum(QUERIES) + 2
    padded = torch.cat([query, torch.ones(3, HEADS, SIZE)])
    output = torch.full_like(padded, 9.0)
    attention.forward(None, padded, None, None, cache, step, output)
    assert (output[sum(QUERIES) : -1] == 0).all()
    assert (output[-1] == 9).all()
    assert (attention.forward(None, padded, None, None, cache, None, output) == 0).all()


def test_a_shared_prefix_is_read_once():
    """Sequences with one prefix use the operator for it, and give the same as each sequence alone."""
    tables, kv, _ = batch()
    tables[1:, 0] = tables[0, 0]
    cache, attention = make_cache(layouts()[0]), make_layer()
    for row in (1, 0, 2):
        slots = slots_of(tables, row, LENS[row])
        attention.do_kv_cache_update(None, kv[row][:, 0], kv[row][:, 1], cache, slots)
    _, _, query = batch()
    found = []
    for shared in (0, 1):
        step = make_step(tables, num_shared_blocks=shared)
        with mock.patch("pc.integrations.vllm.attention.backend.shared_prefix_attention") as spy:
            spy.side_effect = pc.shared_prefix_attention
            found.append(attention.forward(None, query, None, None, cache, step, torch.empty_like(query)))
            assert spy.call_count == shared
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"chunk_lookback": 3}, "option chunk_lookback"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_layers_that_are_not_served_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**options)


def test_a_head_size_too_large_is_refused():
    from pc.integrations.vllm.attention import PagedAttention
    from pc.triton_ops._attention.checks import MAX_HEAD_DIM

    with pytest.raises(ValueError, match="head_size not supported"):
        PagedAttention(1, MAX_HEAD_DIM + 1, 1.0, 1)


def test_a_quantized_output_is_refused():
    with pytest.raises(NotImplementedError, match="output_scale"):
        make_layer().forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
