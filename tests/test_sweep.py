"""From a sweep's rows to the table of constants, and the launches that use it."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.kernels import sweep
from pc.info import _tuned
from pc.triton_ops._attention import build, constants
from pc.triton_ops._attention.arguments import AttentionArgs

WHY = "as fast as two"
MINE = {
    "TILES": {
        ("interpreter", "decode", 128, 4, 16): ((16, 16, 8, 4, False), WHY),
        ("interpreter", "prefill", 128, 4, 64): ((128, 64, 8, 2, True), WHY),
    },
    "PROGRAMS": {"interpreter": (8, WHY)},
}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entries in MINE.items():
        for key, value in entries.items():
            monkeypatch.setitem(getattr(constants, name), key, value)


def test_present_constants_stay_within_noise() -> None:
    rows = [{"present": "1", "p50_us": "100"}, {"present": "0", "p50_us": "98"}, {"present": "0", "note": "fails"}]
    sweep._choose(rows)
    assert "present constants" in rows[0]["reason"]
    rows = [{"present": "1", "p50_us": "100"}, {"present": "0", "p50_us": "50"}]
    sweep._choose(rows)
    assert rows[1]["reason"] == "fastest of 2, 2.00 times as fast as the present"


def row(**changes: Any) -> dict[str, str]:
    base = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "two_loops": 0}
    base |= {"programs": 4, "architecture": "sm_90", "kind": "decode", "head_dim": 128, "group": 4}
    base |= {"block_size": 16, "regime": "r", "present": 0, "reason": "", "p50_us": 100, "device": "H", "date": "D"}
    return {name: str(value) for name, value in (base | changes).items()}


def test_rows_become_entries() -> None:
    rows = [
        row(present=1),
        row(block_n=32, reason="fastest", p50_us=80),
        row(programs=8, p50_us=90),
        row(programs=2, p50_us=70),
        row(regime="q", present=1, reason="within noise"),
        row(regime="q", programs=8, p50_us=90),
        row(regime="q", programs=2, p50_us=150),
        row(regime="p", kind="prefill", present=1),
        row(regime="p", kind="prefill", block_m=64, reason="fastest"),
    ]
    found = sweep.table(rows, "file")
    why = "fastest; H, D, file"
    assert found["TILES"] == {
        ("sm_90", "decode", 128, 4, 16): ((16, 32, 4, 3, False), why),
        ("sm_90", "prefill", 128, 4, 16): ((64, 64, 4, 3, False), why),
    }
    assert found["PROGRAMS"]["sm_90"][0] == 8
    assert found["PROGRAMS"]["sm_90"][1].startswith("1.11 times as fast as before over all decodes")


def written(path: Path) -> dict[str, Any]:
    """Return the entries of a copy of `constants.py`."""
    spec = importlib.util.spec_from_file_location("pc.triton_ops._attention.written", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {spec.name: module}):
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    return {name: getattr(module, name) for name in MINE}


def test_the_table_is_written_and_emptied_again(tmp_path: Path) -> None:
    path = tmp_path / "constants.py"
    shutil.copy(sweep.TABLE, path)
    empty = {name: {} for name in MINE}
    sweep.write_table(empty, path)
    before = path.read_text()
    sweep.write_table(MINE, path)
    assert written(path) == MINE
    sweep.write_table(MINE, path)
    assert written(path) == MINE
    sweep.write_table(empty, path)
    assert path.read_text() == before


def test_an_entry_goes_before_the_rules_where_it_fits_and_nowhere_else(request: pytest.FixtureRequest) -> None:
    fits = ("interpreter", 128, 2, 4, False)
    calls = [
        (fits, None, None),
        (fits, 4, 64),
        (fits, 8, 32),
        (("sm_90", *fits[1:]), 4, 32),
        (("interpreter", 64, *fits[2:]), 4, 32),
        (("interpreter", 128, 4, *fits[3:]), 4, 32),
        (("interpreter", 128, 2, 4, True), 4, 32),  # quantized
        (("interpreter", 128, 2, 32, False), 4, 32),  # more rows
    ]
    tiles = lambda: [constants.decode_tiles(*given, group=g, block_size=b) for given, g, b in calls]  # noqa: E731
    rules, costly = tiles(), constants.prefill_tiles("interpreter", 128, 2, True, 4, 64)
    request.getfixturevalue("table")
    mine = constants.Tiles(16, 16, 8, 4, False)
    assert constants.decode_tiles(*fits, group=4, block_size=32) == mine
    assert mine not in rules
    assert tiles() == rules
    assert rules[-1].block_m == 32
    assert constants.prefill_tiles("interpreter", 128, 2, False, 4, 64) == constants.Tiles(128, 64, 8, 2, True)
    assert constants.prefill_tiles("interpreter", 128, 2, True, 4, 64) == costly, "more work a score"
    assert costly != constants.Tiles(128, 64, 8, 2, True)


def chosen(block_size: int, *q_lens: int) -> Any:
    cache = torch.zeros(64, block_size, 8, 128, dtype=torch.float16)
    one = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    query = torch.zeros(sum(q_lens), 32, 128, dtype=torch.float16)
    call = AttentionArgs(
        query=query,
        key_cache=cache,
        value_cache=cache,
        block_tables=one(*range(64)).expand(len(q_lens), -1).contiguous(),
        seq_lens=one(*[64 * block_size] * len(q_lens)),
        query_start_loc=one(0, *itertools.accumulate(q_lens)),
        scale=1.0,
        with_lse=False,
    )
    return build.build_attention(call)


def test_what_is_launched_is_what_the_table_says(request: pytest.FixtureRequest) -> None:
    before = chosen(16, 1)
    request.getfixturevalue("table")
    decode, prefill, mixed = chosen(16, 1), chosen(64, 512), chosen(64, 512, 1)
    assert decode.target_items == 2 * before.target_items
    assert decode.decode.options["num_warps"] == 8
    assert decode.decode.constants["BLOCK_N"] == 16
    for both in (prefill, mixed):
        assert both.prefill.constants["BLOCK_M"] == 128
        assert both.prefill.options["num_warps"] == 8
    assert prefill.decode is None, "512 queries of one sequence are no decode"
    assert mixed.decode.constants["BLOCK_M"] == 32, "chosen for the prefill alone"


@pytest.mark.usefixtures("table")
def test_info_names_what_is_tuned() -> None:
    found = _tuned("interpreter")
    assert len(found) == 3
    assert all(WHY in text for text in found.values())
    assert _tuned("sm_80") == {}
    assert all("NVIDIA H100" in text for text in _tuned("sm_90").values())


def test_rows_are_given_after_every_lot_as_ratios_to_the_present_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    regime = sweep.regimes(tiny=True)[0]
    present = sweep.Candidate(constants.Tiles(16, 64, 4, 3, False), 4)
    others = [sweep.Candidate(constants.Tiles(16, 32, 4, stages, False), 4) for stages in range(2, 9)]
    drift = iter((1.0, 2.0))

    def time(regime, inputs, ready, *rest):
        clock = next(drift)
        return {
            c: sweep.timing.Quantiles(0, clock * (100 if c == present else 50 + c.tiles.num_stages), 0, 1)
            for c in ready
        }

    monkeypatch.setattr(sweep, "_present", lambda *_: present)
    monkeypatch.setattr(sweep, "candidates", lambda *_: [present, *others])
    monkeypatch.setattr(sweep, "_is_right", lambda *_: True)
    monkeypatch.setattr(sweep, "_time", time)
    lots = list(sweep.sweep_regime(regime, torch.device("cpu"), 0.1))
    assert [len(rows) for rows in lots] == [1 + sweep.TOGETHER, 1 + len(others)]
    assert [row["p50_us"] for row in lots[1]] == ["100.00", *(f"{50 + n}.00" for n in range(2, 9))]
    assert [row["num_stages"] for row in lots[1] if row.get("reason")] == ["2"]


def test_candidates_reach_six_stages() -> None:
    present = sweep.Candidate(constants.Tiles(16, 64, 4, 3, False), 4)
    for regime in sweep.regimes():
        found = sweep.candidates(regime, present, "sm_90")
        assert {c.tiles.num_stages for c in found} >= {2, 3, 4, 5, 6}


def test_candidates_differ_from_the_constants_in_use_by_one_thing() -> None:
    # Without what the rules need (two warps, separate loops, a bound) a sweep has nothing to compare with.
    present = sweep.Candidate(constants.decode_tiles("sm_90", 128, 2, 4, False), 4)
    regime = next(r for r in sweep.regimes() if r.name == "decode" and r.case.head_dim == 128)
    values = dataclasses.asdict(present.tiles)
    found = [dataclasses.asdict(c.tiles) for c in sweep.candidates(regime, present, "sm_90") if c.programs == 4]
    changed = [{name for name in values if tiles[name] != values[name]} for tiles in found]
    for name in ("block_n", "num_stages"):
        assert {name} in changed
    assert {"num_warps", "max_registers"} in changed
    assert {c.programs for c in sweep.candidates(regime, present, "sm_90") if c.tiles == present.tiles} >= {
        2,
        3,
        4,
        6,
        8,
    }
