"""pc.attention_plan: kernels against the numpy plan, balance, refresh in place, and refusal of a wrong plan."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, attend, build, check, plan_of
from plan_oracle import plan_in_numpy
from refusals import check_refused

import pc
from pc.triton_ops._attention.layout import PlanShape, plan_views
from pc.triton_ops._core.runtime import KERNELS_ON_CPU

CASES = [
    Case(lens=(1000, 0, 90, 300), queries=(2, 0, 20, 1)),
    Case(lens=(1000, 70, 90), queries=(1, 1, 8), holes=0.5, window=100, num_sink_tokens=4),
    Case(lens=(700, 90), queries=(3, 8), holes=0.7, scattered=True, block_size=64),
    Case(lens=(700, 90), queries=(3, 8), window=30, scattered=True, block_size=8),
    Case(lens=(700,), queries=(1,), block_size=256, causal=False, window=80),
    Case(lens=(700, 131, 64), queries=(3, 1, 1), holes=0.5, block_size=48),
    Case(lens=(700, 131, 128), queries=(3, 1, 1), holes=0.5, block_size=5),
    Case(lens=(200, 65, 64), queries=(3, 1, 1), holes=0.7, block_size=1),
    Case(lens=(2000, 529, 528), queries=(3, 1, 1), holes=0.4, block_size=528),
    Case(lens=(700, 131, 64), queries=(3, 1, 40), holes=0.6, heads=(6, 3), head_tables=True),
    Case(lens=(700, 90), queries=(3, 8), window=30, scattered=True, holes=0.3, head_tables=True),
    Case(lens=(), queries=()),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_is_as_described(case, device):
    """Kernels make all of it. PyTorch on the CPU makes the options, and no work."""
    batch = build(case).to(device)
    plan, expected = plan_of(batch).cpu(), plan_of(batch, plan_in_numpy)
    shape = PlanShape.of(batch.block_tables, case.block_size)
    assert plan.numel() == expected.numel() == shape.size
    if not case.lens:
        return
    found, wanted = plan_views(plan, shape), plan_views(expected, shape)
    assert torch.equal(plan[1:8], expected[1:8])
    if not (device.type == "cuda" or KERNELS_ON_CPU):
        assert not any(bool(part.any()) for part in found)
        return
    items = int(expected[0])
    assert int(plan[0]) == items
    lens = [length for length in case.lens for _ in range(shape.num_rows // len(case.lens))]
    for length, row, theirs in zip(lens, zip(*(found[i] for i in (0, 2, 3)), strict=True),
                                   zip(*(wanted[i] for i in (0, 2, 3)), strict=True), strict=True):  # fmt: skip
        info, tiles, ranks = row
        assert torch.equal(info, theirs[0])
        assert torch.equal(tiles[: info[7]], theirs[1][: info[7]])
        assert torch.equal(ranks[: -(-length // 64) + 1], theirs[2][: -(-length // 64) + 1])
    assert torch.equal(found[1][:items], wanted[1][:items])


@pytest.mark.interpreter
def test_ragged_batch_is_balanced(device):
    """One long sequence among short ones is split, so that no item is much longer than the mean."""
    lens = (32768, *[1024] * 7)
    tables = torch.arange(8 * 2048, dtype=torch.int32, device=device).view(8, 2048) % 100
    starts = torch.arange(9, dtype=torch.int32, device=device)
    plan = pc.attention_plan(tables, torch.tensor(lens, dtype=torch.int32, device=device), starts, 16, num_kv_heads=1)
    items = plan_views(plan.cpu(), PlanShape.of(tables, 16))[1][: int(plan[0])]
    lengths = items[:, 2] - items[:, 1]
    assert len(items) > 8
    assert lengths.sum() == sum(lens) // 64
    assert lengths.max() <= 1.5 * lengths.sum() / (len(items) - 8)


def test_positions_of_a_tree_may_fall(device):
    """In a tree, positions are depths. Padding after the last query may have any position."""
    pc.set_debug_mode(True)
    tables, lens, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0, 1]], [20], [0, 3]))
    positions = torch.tensor([17, 19, 18, -1], dtype=torch.int32, device=device)
    assert pc.attention_plan(tables, lens, starts, 16, query_positions=positions).dtype == torch.int32


@pytest.mark.parametrize("change", ["window", "positions", "lens", "holes", "mode", "size"])
def test_wrong_plan_is_refused(change, device):
    """It raises on the CPU always, and on a device in debug mode."""
    case = Case(lens=(300, 200), queries=(2, 3), scattered=True)
    batch = build(case).to(device)
    plan = plan_of(batch)
    window, invariant = 0, False
    if change == "window":
        window = 5
    elif change == "positions":
        batch.positions[1] = batch.positions[0] + 1
    elif change == "lens":
        batch.seq_lens[0] -= 1
    elif change == "holes":
        batch.block_tables[0, 0] = -1
        batch.block_tables[0, 1] = -1
    elif change == "mode":
        invariant = True
    else:
        plan = plan[:-1]
    pc.set_debug_mode(True)
    with pytest.raises(ValueError, match="plan: got"):
        attend(batch, "sparse_gap_attention", plan=plan, window=window, batch_invariant=invariant)


def test_a_plan_of_other_tiles_is_refused(device):
    """The masks attend to two tiles each: the last two, or the first and the last."""
    batch = build(Case(lens=(320,), queries=(1,), window=64, num_sink_tokens=64)).to(device)
    pc.set_debug_mode(True)
    check(build(batch.case), *attend(batch, "sliding_window_attention", plan=plan_of(batch)))
    other = pc.attention_plan(*batch.tensors[-3:], batch.case.block_size, window=128)
    with pytest.raises(ValueError, match="plan: got a plan for other options, needs causal=True, window=64,"):
        attend(batch, "sliding_window_attention", plan=other)


def test_compile(device):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(query, key, value, tables, lens, starts):
        plan = pc.attention_plan(tables, lens, starts, 16)
        first = pc.paged_attention(query, key, value, tables, lens, starts, 0.125, plan=plan)
        pc.attention_plan(tables, lens, starts, 16, out=plan)
        return first + pc.paged_attention(first, key, value, tables, lens, starts, 0.125, plan=plan)

    for lens in ((300, 20), (70, 200)):
        tensors = build(Case(lens=lens, queries=(1, 9))).to(device).tensors
        first = pc.paged_attention(*tensors, 0.125)
        assert torch.equal(step(*tensors), first + pc.paged_attention(first, *tensors[1:], 0.125))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size: got 0, needs at least 1"),
        ({"window": -1}, "window: got -1"),
        ({"num_shared_blocks": 1000}, "num_shared_blocks: got 1000"),
        ({"num_kv_heads": 0}, "num_kv_heads: got 0"),
        (
            {"block_tables": torch.zeros(2, 2, 20, dtype=torch.int32), "num_shared_blocks": 1},
            "num_shared_blocks: got 1, needs 0 with a block table per KV head",
        ),
        ({"seq_lens": torch.tensor([1], dtype=torch.int32)}, "seq_lens: got 1 elements, needs 2"),
        ({"seq_lens": torch.tensor([1, 10**6], dtype=torch.int32)}, "seq_lens: got values from 1 to 10000"),
        ({"query_start_loc": torch.tensor([0, 1])}, "query_start_loc: got int64"),
        *(
            (
                {"query_start_loc": torch.tensor(starts, dtype=torch.int32)},
                "query_start_loc: got \\[[-0-9, ]*\\], needs ascending from 0",
            )
            for starts in ([0, 5, 2], [-3, 1, 2], [1, 2, 3])
        ),
        ({"out": torch.zeros(3, dtype=torch.int32)}, "out: got 3 elements"),
        (
            {"query_positions": torch.tensor([3, -2, -9], dtype=torch.int32)},
            "query_positions: got values from -2 to 3, needs 0 to 2147483647",
        ),
    ],
)
def test_bad_arguments(changes, message):
    tensors = build(Case(lens=(300, 200), queries=(1, 1))).tensors[3:]
    given = dict(zip(("block_tables", "seq_lens", "query_start_loc"), tensors, strict=True))
    check_refused(pc.attention_plan, {**given, "block_size": 16}, changes, message)
