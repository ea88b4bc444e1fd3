"""pc.sliding_window_attention: windows, sink tokens, and the work they cost."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import Case, attend, build, check, plan_of
from counted import counted_work, counts_work

from pc.triton_ops._attention import checks
from pc.triton_ops._attention.predicate import Mask

OP = "sliding_window_attention"


def test_memory_behind_the_window_is_not_read(device):
    """Blocks that no query reaches hold NaN; they are in the table or replaced by -1."""
    case = Case(lens=(300, 300), queries=(1, 20), window=40)
    batch = build(case).to(device)
    expected = attend(batch, OP, with_lse=False)
    behind = batch.block_tables[:, : (300 - 20 - 40) // case.block_size].long()
    batch.key_cache[behind], batch.value_cache[behind] = float("nan"), float("nan")
    assert torch.equal(attend(batch, OP, with_lse=False), expected)
    batch.block_tables[:, : behind.shape[1]] = -1
    assert torch.equal(attend(batch, OP, with_lse=False), expected)


@counts_work
@pytest.mark.parametrize(
    ("length", "q_len", "window", "sink_tokens", "tiles", "keys"),
    [
        (1000, 1, 0, 0, 16, 1000),
        (1000, 1, 64, 0, 2, 64),
        (1024, 1, 64, 0, 1, 64),
        (1000, 1, 128, 4, 4, 132),
        (1000, 1, 1, 200, 5, 201),
        (1000, 16, 64, 0, 2, 79),
        (1000, 1, 5000, 4, 16, 1000),
    ],
)
def test_work_does_not_depend_on_the_context_behind_the_window(length, q_len, window, sink_tokens, tiles, keys):
    """Only keys that a query attends to are read, and only their tiles are multiplied."""
    case = Case(lens=(length,), queries=(q_len,), heads=(1, 1), window=window, num_sink_tokens=sink_tokens)
    batch = build(case)
    with counted_work(batch.key_cache) as work:
        attend(batch, OP)
    assert work.read == keys
    assert work.multiplied == 64 * tiles


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "sink_tokens"), [(1, 0), (2, 64), (64, 3), (65, 0), (66, 65), (128, 130)])
@pytest.mark.parametrize("q_len", [1, 2, 8])
def test_no_decode_reaches_more_tiles_than_are_planned_for(q_len, window, sink_tokens, causal):
    mask = Mask(window, sink_tokens, causal, True, True)
    t, most = torch.arange(12 * 64), 0
    for length in range(q_len, 700):
        live = mask.live(t, torch.arange(length - q_len, length)).any(0) & (t < length)
        most = max(most, int(live.view(12, 64).any(1).sum()))
    assert most == mask.max_tiles(q_len)


@pytest.mark.interpreter
@pytest.mark.parametrize(("window", "programs"), [(130, 2), (193, 2), (194, 4)])
def test_decode_within_a_short_window_is_not_split(window, programs, device, chosen):
    """A window within 4 tiles is one work item of a sequence, without idle programs, parts, or a sum of them."""
    batch = build(Case(lens=(2000, 700), queries=(1, 1), heads=(2, 1), window=window, bounds=True)).to(device)
    check(build(batch.case), *attend(batch, OP))
    (call,) = chosen
    assert call.decode.programs[0] == programs
    assert (call.decode_parts is not None) == (programs > 2)


@pytest.mark.interpreter
def test_a_plan_without_the_window_writes_nothing_outside(device, monkeypatch):
    """Devices do not check values. Here such a plan has splits for which the call has no room."""
    batch = build(Case(lens=(1500,), queries=(1,), heads=(2, 1), window=70)).to(device)
    plan = plan_of(dataclasses.replace(batch, case=dataclasses.replace(batch.case, window=0)))
    assert int(plan[0]) > 1
    monkeypatch.setattr(checks, "check_plan", lambda call: None)
    attend(batch, OP, plan=plan)
