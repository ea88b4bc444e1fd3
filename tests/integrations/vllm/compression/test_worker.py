"""Block tables without the holes of compressed requests: attention over them is that over the tables with holes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import pc
from pc.integrations.vllm.compression.worker import Compressor

SIZE, HEADS, DIM = 16, 2, 32
REQUESTS = {  # packed blocks, null blocks, blocks after them, queries
    "compressed": (4, 6, 2, 1),
    "exact": (0, 0, 5, 1),
    "packed more": (2, 9, 3, 1),
    "behind a document": (3, 3, 4, 40),
}


def compressor_of(names):
    compressor = Compressor(SimpleNamespace(), [SimpleNamespace(shape=(SIZE, HEADS, DIM))])
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
