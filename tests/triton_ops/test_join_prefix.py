from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
import torch
from refusals import check_refused
from row_cases import joined, same_bits

import pc


@dataclass(frozen=True)
class Case:
    """Lengths and new tokens of the sequences of a batch."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    block_size: int = 4
    padding: int = 0
    holes: bool = False
    int64: bool = False

    def __str__(self) -> str:
        extra = f"-pad{self.padding}" * bool(self.padding) + "-holes" * self.holes + "-int64" * self.int64
        return f"{'_'.join(map(str, self.seq_lens))}-b{self.block_size}{extra}"


CASES = (
    Case((8,), (4,)),
    Case((12, 8, 5, 1), (12, 4, 1, 1)),
    Case((17, 0, 3, 64), (0, 0, 2, 60), holes=True),
    Case((9, 30) * 6, (1, 2) * 6, block_size=16, padding=3, holes=True),
    Case((300, 77), (130, 7), block_size=16, padding=600, holes=True, int64=True),
    Case((5, 6), (0, 0), block_size=1),
    Case((), ()),
    Case((), (), padding=4),
    Case((0, 0), (0, 0), padding=2),
)


def inputs(case, features, dtype, device, scattered=False):
    """Return arguments of join_prefix with random contents."""
    generator = torch.Generator().manual_seed(len(case.seq_lens))
    num_blocks = sum(-(-n // case.block_size) for n in case.seq_lens) + 3
    width = max([-(-n // case.block_size) for n in case.seq_lens], default=0) + 1
    tables = torch.full((len(case.seq_lens), width), -1, dtype=torch.int32)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    for s, length in enumerate(case.seq_lens):
        for b in range(-(-length // case.block_size)):
            tables[s, b] = -1 if case.holes and b % 3 == 1 else free.pop()
    cache = torch.randint(-99, 99, (num_blocks, case.block_size, *features), generator=generator).to(dtype)
    new = torch.randint(-99, 99, (sum(case.query_lens) + 2, *features), generator=generator).to(dtype)
    index = torch.int64 if case.int64 else torch.int32
    positions = None
    if scattered:
        picked = [
            torch.randperm(n, generator=generator)[:q].sort().values
            for n, q in zip(case.seq_lens, case.query_lens, strict=True)
        ]
        positions = torch.cat([*picked, torch.zeros(2, dtype=torch.int64)]).to(index).to(device)
    return (
        cache.to(device),
        tables.to(index).to(device),
        torch.tensor(case.seq_lens, dtype=index, device=device),
        new.to(device),
        torch.tensor([0, *accumulate(case.query_lens)], dtype=index, device=device),
        sum(case.seq_lens) + case.padding,
        positions,
    )


@pytest.mark.parametrize("scattered", [False, True], ids=("suffix", "scattered"))
@pytest.mark.parametrize("features", [(), (5,), (2, 64)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_every_batch(case, features, scattered, device):
    arguments = inputs(case, features, torch.int16, device, scattered)
    expected = joined(*arguments)
    assert torch.equal(torch.ops.pc.join_prefix(*arguments).cpu(), expected)


@pytest.mark.parametrize("case", [Case((70, 45), (30, 1), 16, 3, holes=True), Case((64, 0, 9), (0, 0, 9), 4)], ids=str)
def test_long_sequences(case, device):
    arguments = inputs(case, (10_000,), torch.int16, device)
    assert torch.equal(torch.ops.pc.join_prefix(*arguments).cpu(), joined(*arguments))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.complex128], ids=str)
def test_every_dtype_and_layout(layout, dtype, strided, random_bits, device):
    case = CASES[1]
    _, *rest = inputs(case, (3, 8), torch.float32, device)
    num_blocks = 3 + sum(-(-n // 4) for n in case.seq_lens)
    rest[2] = random_bits(rest[2].shape, dtype)
    cache = strided(layout, (num_blocks, 4, 3, 8), dtype)
    assert same_bits(torch.ops.pc.join_prefix(cache, *rest), joined(cache, *rest))


def test_list_of_caches_shares_one_map(device):
    built = [inputs(CASES[4], features, dtype, device) for features, dtype in (((), torch.int64), ((7,), torch.bool))]
    built += [inputs(CASES[4], (i + 1,), torch.float16, device) for i in range(8)]
    rest = built[0][1:3], built[0][4:]
    outs = torch.ops.pc.join_prefix_list([b[0] for b in built], *rest[0], [b[3] for b in built], *rest[1])
    for arguments, out in zip(built, outs, strict=True):
        assert same_bits(out, joined(*arguments))


def test_entries_after_the_last_block_are_not_read(device):
    """Engines leave old numbers there, and some leave memory as it was. Attention operators do not read them either."""
    cache, lens = torch.randn(4, 2, 3, device=device), torch.tensor([3, 0, 2], device=device)
    tables = torch.tensor([[1, 3, 99], [2**31 - 1] * 3, [0, -7, -(2**31)]], dtype=torch.int32, device=device)
    starts = torch.zeros(4, dtype=torch.int64, device=device)
    out = pc.join_prefix(cache, tables, lens, cache.new_empty(0, 3), starts, 5)
    assert torch.equal(out, torch.cat((cache[1], cache[3, :1], cache[0])))


def test_offsets_beyond_two_to_the_31(device):
    if device.type == "cuda":
        cache = torch.zeros(2051, 16, 1 << 16, dtype=torch.uint8, device=device)
    else:
        cache = torch.from_numpy(np.zeros((2051, 16, 1 << 16), np.uint8))
    cache[2050, 1] = 3
    tables = torch.tensor([[2050]], dtype=torch.int32, device=device)
    new = torch.full((1, 1 << 16), 4, dtype=torch.uint8, device=device)
    out = pc.join_prefix(cache, tables, torch.tensor([3], device=device), new, torch.tensor([0, 1], device=device), 3)
    assert out.amin(1).tolist() == out.amax(1).tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("num_rows", 12, "num_rows: got 12, needs at least 13"),
        ("num_rows", -1, "num_rows: got -1"),
        ("new", lambda x: x[:, :2], r"new: got shape \[5, 2\]"),
        ("new", lambda x: x.double(), "new: got float64"),
        ("seq_lens", lambda x: x[:1], "query_start_loc|block_tables"),
        ("seq_lens", lambda x: x + 9, "seq_lens: got 17, needs at most 16"),
        ("seq_lens", lambda x: x - 4, "seq_lens: got a sequence shorter"),
        ("seq_lens", lambda x: x.float(), "seq_lens: .*int32 or int64"),
        ("block_tables", lambda x: x + 20, "block_tables: got values"),
        ("query_start_loc", lambda x: x + 3, "query_start_loc: got"),
        ("new_positions", torch.tensor([3, 2, 1, 0, 0]), "new_positions: .*ascending"),
        ("new_positions", torch.tensor([0, 1, 9, 0, 1]), "new_positions: .*within their"),
        ("new_positions", torch.tensor([0, 1]), "new_positions: got 2 elements, needs 5"),
    ],
)
def test_bad_arguments_are_named(name, change, message):
    tables, lens, starts = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([8, 5]), torch.tensor([0, 3, 5])
    given = {"cache": torch.zeros(8, 4, 3), "block_tables": tables, "seq_lens": lens, "new": torch.ones(5, 3)}
    given |= {"query_start_loc": starts, "num_rows": 13}
    pc.join_prefix(**given)
    check_refused(pc.join_prefix, given, {name: change}, message)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("caches", lambda x: x[:0], "caches: got an empty list"),
        ("caches", lambda x: [x[0], x[0][1:]], "caches: got shapes"),
        ("news", lambda x: x[:0], "news: got an empty list"),
        ("news", lambda x: x * 2, "news: got 2 tensors, needs 1, one per cache"),
    ],
)
def test_bad_lists_are_named(name, change, message):
    given = {"caches": [torch.zeros(8, 4, 3)], "block_tables": torch.tensor([[1]]), "seq_lens": torch.tensor([2])}
    given |= {"news": [torch.ones(2, 3)], "query_start_loc": torch.tensor([0, 2]), "num_rows": 2}
    pc.join_prefix_list(**given)
    check_refused(pc.join_prefix_list, given, {name: change}, message)


@pytest.mark.gpu
def test_pinned_cache_and_a_captured_graph():
    first, second = inputs(CASES[1], (64,), torch.float32, "cuda"), inputs(CASES[1], (64,), torch.float32, "cuda", True)
    pinned = (first[0].cpu().pin_memory(), *first[1:])
    assert torch.equal(pc.join_prefix(*pinned).cpu(), joined(*first))
    static = [a.clone() if isinstance(a, torch.Tensor) else a for a in second]
    pc.join_prefix(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pc.join_prefix(*static)
    static[0].neg_()
    graph.replay()
    assert torch.equal(out.cpu(), joined(-second[0], *second[1:]))
