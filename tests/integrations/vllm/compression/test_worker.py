"""Block tables without the holes of compressed requests, and packing in each layout of a KV cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import pc
from pc.integrations.vllm.api import call_around_update
from pc.integrations.vllm.compression.scheduler import Packing
from pc.integrations.vllm.compression.worker import Compressor, pack, page_strides

SIZE, HEADS, DIM = 16, 2, 32
REQUESTS = {  # packed blocks, null blocks, blocks after them, queries
    "compressed": (4, 6, 2, 1),
    "exact": (0, 0, 5, 1),
    "packed more": (2, 9, 3, 1),
    "behind a document": (3, 3, 4, 40),
}


def compressor_of(names):
    compressor = Compressor(SimpleNamespace(), {}, SIZE)
    compressor.holes = {name: REQUESTS[name][:2] for name in names if REQUESTS[name][1]}
    output = SimpleNamespace(num_scheduled_tokens={name: REQUESTS[name][3] for name in names})
    compressor.follow(names, output)
    return compressor


@pytest.mark.parametrize("names", [[*REQUESTS], ["compressed", "packed more"], ["exact"]], ids=len)
@pytest.mark.parametrize("padding", [0, 2])
def test_attention_is_the_same(names, padding):
    torch.manual_seed(0)
    cases = [REQUESTS[name] for name in names]
    width, numbers = max(sum(case[:3]) for case in cases), iter(torch.randperm(60).tolist())
    tables = torch.full((len(cases) + padding, width), -1, dtype=torch.int32)
    for row, (packed, holes, behind, _) in enumerate(cases):
        for at in [*range(packed), *range(packed + holes, packed + holes + behind)]:
            tables[row, at] = next(numbers)
    lens = torch.tensor([sum(case[:3]) * SIZE - 3 for case in cases] + [0] * padding, dtype=torch.int32)
    counts = [case[3] for case in cases] + [0] * padding
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    query = torch.randn(sum(counts), 4, DIM)
    keys, values = torch.randn(2, 60, SIZE, HEADS, DIM)
    longest = int(lens.max())
    expected = pc.paged_attention(query, keys, values, tables, lens, starts, DIM**-0.5)
    closed, own, bound = compressor_of(names).close_holes(tables, lens, longest)
    assert bound >= own.max()
    assert closed.shape[1] == -(-bound // SIZE)
    assert (bound < longest) == all(case[1] for case in cases)
    found = pc.paged_attention(query, keys, values, closed, own, starts, DIM**-0.5, max_seq_len=bound)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for row, case in enumerate(cases):
        used = closed[row, : -(-int(own[row]) // SIZE)]
        assert (used >= 0).all()
        assert len(used) == case[0] + case[2]


@pytest.mark.parametrize("by_head", [False, True])
def test_a_dummy_batch_has_no_holes(by_head):
    """Runner V2 computes one between the steps of an engine if another data-parallel rank has requests."""
    names = ["compressed", "packed more"]
    table = torch.zeros(1, 4, dtype=torch.int32)
    steps = {"update_requests": lambda output: None, "prepare_inputs": lambda output: SimpleNamespace(req_ids=names)}
    runner = SimpleNamespace(**steps, prepare_dummy_attn=lambda *given: given)
    compressor = Compressor(runner, {}, SIZE)
    call_around_update(runner, compressor.follow)
    compressor.holes = {name: REQUESTS[name][:2] for name in names}
    compressor.tables = {name: {"layer": table} for name in names} if by_head else {}
    runner.prepare_inputs(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1)))
    assert (compressor.by_head is not None) == by_head
    assert runner.prepare_dummy_attn("batch", True) == ("batch", True)
    assert compressor.by_head is None
    lens = torch.ones(1, dtype=torch.int32)
    assert compressor.close_holes(table, lens, 1) == (table, lens, 1)


def cache_in(layout, blocks):
    """Numbers that do not depend on the layout, `[blocks, HEADS, SIZE, 2 * DIM]`."""
    cache = torch.randn(blocks, HEADS, SIZE, 2 * DIM, generator=torch.Generator().manual_seed(0))
    if layout == "tokens first":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "gaps between blocks":
        return torch.cat([cache, torch.full((blocks, HEADS, 1, 2 * DIM), torch.nan)], 2)[:, :, :SIZE]
    return cache


@pytest.mark.parametrize("layout", ["tokens first", "gaps between blocks"])
@pytest.mark.parametrize("by_head", [False, True])
def test_each_layout_is_packed_alike(layout, by_head):
    """The kept tokens are those of the plain layout, and pages of heads lead to them."""
    packing = Packing("one", "expected_attention", 7 * SIZE + 5, [8, 3, 5, 1, 6, 2, 9], [5, 4, 8], 7, None, by_head)
    query, found = torch.randn(packing.tokens, 2 * HEADS, DIM), []
    for each in ("heads first", layout):
        cache = cache_in(each, 10)
        impl = SimpleNamespace(num_heads=2 * HEADS, head_size=DIM, scale=DIM**-0.5, scales=lambda _: {})
        table = pack(SimpleNamespace(kv_cache=cache, impl=impl), packing, [query[:9], query[9:]])
        found.append(cache.clone())
        if table is not None:
            unit, block, head = page_strides(cache)
            pages = cache.as_strided((9 * block + head + 1, SIZE, 2 * DIM), (unit, cache.stride(2), 1))
            assert sorted(table[table >= 0].tolist()) == sorted(t * block + h * head for t in (5, 4, 8) for h in (0, 1))
            found[-1] = torch.cat([pages[own[own >= 0]] for own in table])
    assert torch.equal(*found)
