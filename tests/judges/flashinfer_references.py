"""FlashInfer's references in PyTorch compared with our operators, for batches drawn by the sample's seed.

They can be imported without its compiled parts if an empty module of the package's name is put before its folder.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import pc
from pc import flash_attn

_package = ModuleType("flashinfer")
_package.__path__ = [os.path.join(os.getcwd(), "flashinfer")]
sys.modules["flashinfer"] = _package
attention = importlib.import_module("flashinfer.trace.templates.attention")
cascade = importlib.import_module("flashinfer.trace.templates.cascade")
page = importlib.import_module("flashinfer.trace.templates.page")
rope = importlib.import_module("flashinfer.trace.templates.rope")

BASE_2 = math.log(2.0)
drawn = pytest.mark.parametrize("draw", range(12))


class Batch(NamedTuple):
    """A batch with a paged cache in float32, as FlashInfer's calls and ours take it; pages are full if asked."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    scale: float


@pytest.fixture(autouse=True)
def _seeded(request: Any) -> Iterator[None]:
    torch.manual_seed(hash((json.loads(os.environ["JUDGE"])["seed"], request.node.callspec.params["draw"])))
    with torch.no_grad():
        yield


def _number(least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, ()))


def _i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _starts(counts: list[int]) -> torch.Tensor:
    return torch.nn.functional.pad(_i32(counts).cumsum(0, dtype=torch.int32), (1, 0))


def _batch(
    decode: bool = False, full: bool = True, queries: int | None = None, latent: bool = False, dim: int = 48
) -> Batch:
    size, count, kv_heads = 2 ** _number(0, 4), _number(1, 4), 1 if latent else _number(1, 3)
    heads, dim = kv_heads * _number(1, 4), dim if latent else 16 * _number(1, 5)
    pages = [_number(1, 5) for _ in range(count)]
    lens = [n * size - (0 if full else _number(0, size - 1)) for n in pages]
    lengths = [1 if decode else min(length, queries or _number(1, 9)) for length in lens]
    if queries is not None:
        lens, lengths = [max(queries, length) for length in lens], [queries] * count
        pages = [-(-length // size) for length in lens]
    order = torch.randperm(sum(pages) + 2).int()
    tables = torch.full((count, max(pages)), -1, dtype=torch.int32)
    first = 0
    for row, n in enumerate(pages):
        tables[row, :n] = order[first : first + n]
        first += n
    shape = (len(order), size, kv_heads, dim)
    q, k, v = torch.randn(sum(lengths), heads, dim), torch.randn(shape), torch.randn(shape)
    return Batch(q, k, v, tables, _i32(lens), _starts(lengths), _starts(pages), order[:first], dim**-0.5)


def _ours(batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = pc.paged_attention_with_lse(*batch[:6], batch.scale, **options)
    return out, lse / BASE_2


def _equal(ours: Any, theirs: Any, rounded: bool = False) -> None:
    """Check that results are equal within float32's rounding of sums, or bfloat16's if FlashInfer rounds to it."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a = a.reshape(b.shape)
        tolerance = 2.0**-8 if rounded and i == 0 else 2e-5
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance if rounded and i == 0 else 1e-5)


@drawn
def test_gqa_paged_decode(draw: int) -> None:
    b = _batch(decode=True)
    _equal(_ours(b), attention._gqa_paged_decode_reference(b.q, b.k, b.v, b.page_starts, b.pages, b.scale), True)


@drawn
def test_gqa_paged_prefill(draw: int) -> None:
    b = _batch()
    theirs = attention._gqa_paged_prefill_reference(b.q, b.k, b.v, b.starts, b.page_starts, b.pages, b.scale)
    _equal(_ours(b), theirs, True)


@drawn
def test_gqa_ragged_prefill(draw: int) -> None:
    b = _batch()
    begins = torch.nn.functional.pad(b.lens.cumsum(0, dtype=torch.int32), (1, 0))
    k, v = (torch.randn(int(begins[-1]), *x.shape[2:]) for x in (b.k, b.v))
    out, lse = flash_attn.flash_attn_varlen_func(
        b.q, k, v, b.starts, begins, softmax_scale=b.scale, causal=True, return_softmax_lse=True
    )
    theirs = attention._gqa_ragged_prefill_reference(b.q, k, v, b.starts, begins, b.scale)
    _equal((out, lse.T / BASE_2), theirs, True)


def _latent(b: Batch) -> tuple[torch.Tensor, ...]:
    return b.q[..., :32], b.q[..., 32:], b.k[:, :, 0, :32], b.k[:, :, 0, 32:]


def _ours_latent(b: Batch, value_dim: int = 32, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (b.q, b.k[:, :, 0], b.tables, b.lens, b.starts, b.scale)
    out, lse = pc.latent_attention_with_lse(*rows, value_dim=value_dim, **options)
    return out, lse / BASE_2


@drawn
def test_mla_paged_decode(draw: int) -> None:
    b = _batch(decode=True, latent=True)
    theirs = attention._mla_paged_decode_reference(*_latent(b), b.page_starts, b.pages, b.scale)
    _equal(_ours_latent(b), theirs, True)


@drawn
def test_mla_paged_prefill(draw: int) -> None:
    b = _batch(latent=True)
    theirs = attention._mla_paged_prefill_reference(*_latent(b), b.starts, b.page_starts, b.pages, b.scale)
    _equal(_ours_latent(b), theirs, True)


@drawn
def test_dsa_paged(draw: int) -> None:
    b, top_k = _batch(latent=True), _number(1, 6)
    slots = b.k.shape[0] * b.k.shape[1]
    chosen = torch.rand(len(b.q), slots).argsort(1)[:, :top_k].sort(1).values.int()
    chosen[torch.arange(top_k) >= torch.randint(0, top_k + 1, (len(b.q), 1))] = -1
    table, one = torch.arange(slots, dtype=torch.int32)[None], _i32([0, len(b.q)])
    rows = (b.q, b.k.view(-1, 1, 48), table, _i32([slots]), one, None, b.scale, 32)
    out, lse = pc.sparse_latent_attention_with_lse(*rows, causal=False, query_blocks=chosen[:, None])
    _equal((out, lse / BASE_2), attention._dsa_paged_reference(*_latent(b), chosen, b.scale), True)


def _single() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, length, queries = _batch(), _number(9, 40), _number(1, 9)
    q, k, v = (torch.randn(n, x.shape[-2], x.shape[-1]) for n, x in ((queries, b.q), (length, b.k), (length, b.v)))
    return q, k, v


@drawn
def test_single_decode(draw: int) -> None:
    q, k, v = _single()
    ours = flash_attn.flash_attn_func(q[None, :1], k[None], v[None])[0, 0]
    _equal((ours,), (attention._single_decode_reference(q[0], k, v),))


@drawn
@pytest.mark.parametrize("causal", [False, True])
def test_single_prefill(causal: bool, draw: int) -> None:
    q, k, v = _single()
    ours = flash_attn.flash_attn_func(q[None], k[None], v[None], causal=causal)[0]
    _equal((ours,), (attention._single_prefill_reference(q, k, v, causal=causal),))


def _joined(b: Batch, layout: str) -> torch.Tensor:
    """Return one tensor of keys and values, its pages with heads or tokens first."""
    joined = torch.stack((b.k, b.v), 1)
    return joined.transpose(2, 3).contiguous() if layout == "HND" else joined


@drawn
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_trtllm_batch_decode(layout: str, draw: int) -> None:
    b = _batch(full=False, queries=_number(1, 3))
    rows, options = (b.tables, b.lens, int(b.lens.max())), {"kv_layout": layout, "bmm1_scale": b.scale}
    cache = _joined(b, layout)
    k, v = cache.transpose(2, 3).unbind(1) if layout == "HND" else cache.unbind(1)  # views, not copies
    ours = _ours(b._replace(k=k, v=v), causal=False)[0]
    _equal((ours,), (attention._trtllm_batch_decode_reference(b.q, cache, None, *rows, **options),))


@drawn
def test_trtllm_batch_context(draw: int) -> None:
    b = _batch(full=False)
    rows = (b.tables, b.lens, int(b.starts.diff().max()), int(b.lens.max()), b.scale, 1.0, len(b.lens), b.starts, None)
    theirs = attention._trtllm_batch_context_reference(b.q, _joined(b, "HND"), None, *rows)
    _equal((_ours(b)[0],), (theirs,))


@drawn
def test_trtllm_batch_decode_block_sparse(draw: int) -> None:
    b = _batch(decode=True)
    heads, size, columns = b.k.shape[2], b.k.shape[1], b.tables.shape[1]
    counts = torch.randint(1, columns + 1, (heads, len(b.lens)))
    packed = torch.randint(0, b.k.shape[0], (heads, len(b.lens), columns)).int()
    # FlashInfer has the chosen pages first; ours has holes, and the last token must be the sequence's.
    holes = torch.stack([torch.stack([row.roll(columns - int(n)) for row, n in zip(*each, strict=True)])
                         for each in zip(packed, counts, strict=True)])  # fmt: skip
    holes[torch.arange(columns) < columns - counts[..., None]] = -1
    lens = torch.full_like(b.lens, columns * size)
    tables = holes.transpose(0, 1).contiguous()
    ours = pc.sparse_gap_attention(b.q, b.k, b.v, tables, lens, b.starts, None, b.scale)
    cache, rows = _joined(b, "HND"), (packed, (counts * size).int(), columns * size)
    theirs = attention._trtllm_batch_decode_block_sparse_reference(b.q, cache, None, *rows, bmm1_scale=b.scale)
    _equal((ours,), (theirs,))


@drawn
@pytest.mark.parametrize("ragged", [False, True])
def test_trtllm_batch_decode_mla(ragged: bool, draw: int) -> None:
    queries = _number(1, 3)
    b = _batch(full=False, queries=None if ragged else queries, latent=True)
    query = b.q if ragged else b.q.view(len(b.lens), queries, *b.q.shape[1:])
    rows, options = (None, 32, 32, 16, b.tables, b.lens, int(b.lens.max())), {"bmm1_scale": b.scale}
    options |= {"cum_seq_lens_q": b.starts} if ragged else {}
    theirs = attention._trtllm_batch_decode_mla_reference(query, b.k[:, :, 0], *rows, **options)
    _equal((_ours_latent(b, causal=False)[0],), (theirs,))


@drawn
def test_trtllm_batch_decode_mla_sparse(draw: int) -> None:
    b, top_k = _batch(queries=2, latent=True), _number(1, 4)
    pages = torch.rand(len(b.lens), 2, b.k.shape[0]).argsort(-1)[..., :top_k].sort(-1).values.int()
    every, count = torch.arange(b.k.shape[0], dtype=torch.int32)[None], b.k.shape[0] * b.k.shape[1]
    rows = (b.q, b.k[:, :, 0], every, _i32([count]), _i32([0, len(b.q)]), None, b.scale, 32)
    ours = pc.sparse_latent_attention(*rows, causal=False, query_blocks=pages.view(len(b.q), 1, -1))
    query, cache = b.q.view(-1, 2, *b.q.shape[1:]), b.k[:, :, 0]
    rows = (None, 32, 32, 16, pages, None, None, top_k)
    theirs = attention._trtllm_batch_decode_mla_sparse_reference(query, cache, *rows, bmm1_scale=b.scale)
    _equal((ours,), (theirs,))


@drawn
def test_xqa_batch_decode(draw: int) -> None:
    b = _batch(decode=True, full=False)
    rows, options = (None, b.tables, b.lens, int(b.lens.max())), {"kv_layout": "NHD", "bmm1_scale": b.scale}
    _equal((_ours(b)[0],), (attention._xqa_batch_decode_reference(b.q, (b.k, b.v), *rows, **options),))


@drawn
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_cudnn_batch_decode(windowed: bool, sinks: bool, draw: int) -> None:
    b, left = _batch(full=False, queries=_number(1, 3)), _number(0, 20)
    sink, queries = torch.randn(b.q.shape[1]) if sinks else None, int(b.starts[1])
    window = left if windowed else -1
    options = {"block_tables": b.tables, "actual_seq_lens_kv": b.lens, "q_len_per_req": queries, "sinks": sink}
    k, v = (x.transpose(1, 2).contiguous() for x in (b.k, b.v))
    theirs = attention._cudnn_batch_decode_reference(b.q, k, v, b.scale, None, None, window_left=window, **options)
    if windowed:
        ours = pc.sliding_window_attention(*b[:6], b.scale, left + 1, sinks=sink)
    else:
        ours = pc.paged_attention(*b[:6], b.scale, sinks=sink)
    _equal((ours,), (theirs,))


@drawn
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_batch_prefill(causal: bool, draw: int) -> None:
    b = _batch(full=False)
    k, v = (x.transpose(1, 2).contiguous() for x in (b.k, b.v))
    rows = (b.scale, None, None, None, b.starts.diff(), b.lens, causal, True)
    _equal(_ours(b, causal=causal), attention._cudnn_batch_prefill_reference(b.q, k, v, *rows, block_tables=b.tables))


def _whole_cache(decode: bool = False) -> tuple[Batch, tuple[torch.Tensor, torch.Tensor]]:
    """Return a sequence that has all pages, in order."""
    b = _batch(decode)
    count = b.k.shape[0]
    tables, lens = torch.arange(count, dtype=torch.int32)[None], _i32([count * b.k.shape[1]])
    return b._replace(tables=tables, lens=lens, starts=_i32([0, len(b.q)])), (b.k, b.v)


@drawn
def test_batch_attention_run(draw: int) -> None:
    b, cache = _whole_cache()
    _equal(_ours(b, causal=False), attention._batch_attention_run_reference(b.q, cache))


@drawn
def test_multi_level_cascade_run(draw: int) -> None:
    b, cache = _whole_cache()
    if b.k.shape[0] < 2:
        pytest.skip("one page")
    shared, count, size = _number(1, b.k.shape[0] - 1), len(b.q), b.k.shape[1]
    parts = [
        pc.paged_attention_with_lse(
            *b[:3], part.repeat(count, 1), _i32([part.shape[1] * size] * count), _starts([1] * count), b.scale
        )
        for part in (b.tables[:, :shared], b.tables[:, shared:])
    ]
    ours = pc.merge_attention(*parts[0], *parts[1])[0]
    _equal((ours,), (attention._multi_level_cascade_run_reference(b.q, cache),))


@drawn
def test_cute_dsl_batch_prefill_run(draw: int) -> None:
    q, length = torch.randn(_number(1, 9), _number(1, 6), 16 * _number(1, 5)), _number(9, 40)
    k, v = torch.randn(length, *q.shape[1:]), torch.randn(length, *q.shape[1:])
    ours = flash_attn.flash_attn_func(q[None], k[None], v[None], causal=True)[0]
    _equal((ours,), (attention._cute_dsl_batch_prefill_run_reference(q, k, v),))


@drawn
def test_pod_run(draw: int) -> None:
    q, k, v = _single()
    b, cache = _whole_cache()
    ours = flash_attn.flash_attn_func(q[None], k[None], v[None], causal=True)[0], _ours(b, causal=False)[0]
    _equal(ours, attention._pod_run_reference(q, k, v, b.q, cache))


@drawn
def test_batch_pod_run(draw: int) -> None:
    (a, first), (b, second) = _whole_cache(), _whole_cache(decode=True)
    ours = _ours(a, causal=False)[0], _ours(b, causal=False)[0]
    _equal(ours, attention._batch_pod_run_reference(a.q, first, b.q, second))


@drawn
def test_cute_dsl_batch_mla_run(draw: int) -> None:
    queries, value_dim = _number(1, 3), 16 * _number(1, 5)
    b = _batch(full=False, queries=queries, latent=True, dim=value_dim + 64)
    rows = (b.q.view(len(b.lens), queries, *b.q.shape[1:]), b.k[:, :, 0], b.tables, b.lens, int(b.lens.max()), b.scale)
    _equal((_ours_latent(b, value_dim, causal=False)[0],), (attention._cute_dsl_batch_mla_run_reference(*rows),))


@drawn
def test_xqa(draw: int) -> None:
    b = _batch(decode=True, full=False)
    q_scale, kv_scale = (0.5 + torch.rand(2)).tolist()
    ours = _ours(b._replace(scale=b.scale * q_scale * kv_scale))[0]
    rows = (b.q, b.k, b.v, b.tables, b.lens)
    _equal((ours,), (page._xqa_reference(*rows, q_scale=q_scale, kv_scale=kv_scale),))


@drawn
def test_xqa_mla(draw: int) -> None:
    b = _batch(decode=True, full=False, latent=True)
    rows = (b.q, b.k[:, :, 0], b.k[:, :, 0, :32], b.tables, b.lens)
    _equal((_ours_latent(b)[0],), (page._xqa_mla_reference(*rows, q_scale=b.scale),))


@drawn
def test_trtllm_fmha_v2_prefill(draw: int) -> None:
    b = _batch(full=False)
    begins = torch.nn.functional.pad(b.lens.cumsum(0, dtype=torch.int32), (1, 0))
    k, v = torch.randn(2, int(begins[-1]), *b.q.shape[1:])
    longest = (int(b.starts.diff().max()), int(b.lens.max()))
    options = {"softmax_scale": b.scale, "causal": True}
    ours = flash_attn.flash_attn_varlen_func(b.q, k, v, b.starts, begins, *longest, **options)
    rows = ((b.q, k, v), b.lens, *longest, b.scale, 1.0, len(b.lens), b.starts, begins)
    _equal((ours,), (page._trtllm_fmha_v2_prefill_reference(*rows),))


@drawn
def test_merge_states(draw: int) -> None:
    shape = (_number(1, 9), _number(2, 5), _number(1, 8))
    v, s = torch.randn(*shape, 16 * _number(1, 5)), torch.randn(shape) * 5
    parts = list(zip(v.unbind(1), (s * BASE_2).unbind(1), strict=True))
    ours = parts[0]
    for part in parts[1:]:
        ours = pc.merge_attention(*ours, *part)
    _equal((ours[0], ours[1] / BASE_2), cascade._merge_states_reference(v, s))


@drawn
def test_merge_state_in_place(draw: int) -> None:
    shape = (_number(1, 9), _number(1, 8), 16 * _number(1, 5))
    (a, b), (s, t) = torch.randn(2, *shape), torch.randn(2, *shape[:2]) * 5
    mask = torch.rand(shape[0]) < 0.5
    absent = torch.where(mask[:, None], t * BASE_2, float("-inf"))
    out, lse = pc.merge_attention(a, s * BASE_2, b, absent)
    _equal((out, lse / BASE_2), cascade._merge_state_in_place_reference(a, s, b, t, mask))


@drawn
@pytest.mark.parametrize("neox", [False, True])
def test_apply_rope_with_cos_sin_cache(neox: bool, draw: int) -> None:
    tokens, heads, kv_heads, dim = _number(1, 9), _number(1, 6), _number(1, 3), 16 * _number(1, 5)
    angles = torch.randn(50, _number(1, dim // 2))
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.randint(0, 50, (tokens,))
    q, k, v = torch.randn(tokens, heads, dim), *torch.randn(2, tokens, kv_heads, dim)
    caches = torch.zeros(2, tokens, 1, kv_heads, dim).unbind()
    ours = pc.rope_and_cache(q, k, v, positions, cos_sin, *caches, torch.arange(tokens), interleaved=not neox)
    rows = (positions, q.view(tokens, -1), k.view(tokens, -1), dim, cos_sin, neox)
    theirs = rope._apply_rope_with_cos_sin_cache_reference(*rows)
    _equal((ours, caches[0][:, 0]), (theirs[0].view(q.shape), theirs[1].view(k.shape)))


@drawn
def test_append_paged_mla_kv_cache(draw: int) -> None:
    b = _batch(latent=True)
    rows = torch.arange(len(b.lens)).repeat_interleave(b.starts.diff())
    positions = b.lens[rows] - b.starts.diff()[rows] + torch.arange(len(b.q)) - b.starts[rows]
    new, ours, size = torch.randn(len(b.q), 48), b.k[:, :, 0].clone(), b.k.shape[1]
    theirs = ours[..., :32].clone(), ours[..., 32:].clone()
    page._append_paged_mla_kv_cache_reference(
        new[:, :32], new[:, 32:], rows, positions, *theirs, b.pages, b.page_starts, None
    )
    slots = b.tables[rows, positions // size].long() * size + positions % size
    pc.scatter_slots(new, ours, slots)
    assert torch.equal(ours, torch.cat(theirs, -1))


@drawn
def test_merge_state(draw: int) -> None:
    shape = (_number(1, 9), _number(1, 8), 16 * _number(1, 5))
    (a, b), (s, t) = torch.randn(2, *shape), torch.randn(2, *shape[:2]) * 5
    out, lse = pc.merge_attention(a, s * BASE_2, b, t * BASE_2)
    _equal((out, lse / BASE_2), cascade._merge_state_reference(a, s, b, t))


@drawn
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_paged_kv_cache(layout: str, draw: int) -> None:
    b = _batch()
    rows = torch.arange(len(b.lens)).repeat_interleave(b.starts.diff())
    nth = torch.arange(len(b.q)) - b.starts[rows]
    positions = b.lens[rows] - b.starts.diff()[rows] + nth
    key, value = torch.randn(2, len(b.q), *b.k.shape[2:])
    caches = [x.transpose(1, 2).contiguous() if layout == "HND" else x.clone() for x in (b.k, b.v)]
    k, v = caches[0].clone(), caches[1].clone()
    page._append_paged_kv_cache_reference(
        key, value, rows, positions, tuple(caches), b.pages, b.page_starts, None, kv_layout=layout
    )
    size = b.k.shape[1]
    slots = b.tables[rows, positions // size].long() * size + positions % size
    seen = (x.transpose(1, 2) if layout == "HND" else x for x in (k, v))
    pc.reshape_and_cache(key, value, *seen, slots)
    assert torch.equal(k, caches[0])
    assert torch.equal(v, caches[1])
