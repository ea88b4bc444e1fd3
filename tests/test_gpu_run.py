"""`make gpu` without a GPU: how it is cut and resumed, and a dry run of every kind of unit."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from pc.bench import PACKAGE, load_benchmarks

load_benchmarks()
gpu, registry, runner, sweep = (
    importlib.import_module(f"{PACKAGE}.{n}") for n in ("gpu", "registry", "runner", "sweep")
)
UNITS = {unit.name: unit for unit in gpu.units()}


@pytest.fixture(autouse=True)
def _plain_empty(_nan_filled_empty):
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def context(tmp_path: Path) -> Any:
    return gpu.Context(tmp_path, dry=True)


def test_slices_hold_every_unit_once_and_are_short() -> None:
    parts = gpu.slices(gpu.units())
    assert [unit.name for part in parts for unit in part] == list(UNITS)
    assert all(sum(unit.seconds for unit in part) < gpu.SLICE_SECONDS < 540 for part in parts)


def test_units_hold_every_operator_every_case_and_every_test_file() -> None:
    for benchmark in registry.discover():
        parts = [name for name in UNITS if name.startswith(f"bench {benchmark.op} ")]
        assert (
            (len(parts) - 1) * gpu.CASES_PER_UNIT < len(benchmark.of("cuda", False)) <= len(parts) * gpu.CASES_PER_UNIT
        )
    for path in (registry.ROOT / "tests" / "triton_ops").glob("test_*.py"):
        assert f"numerics {path.name}" in UNITS or path.name == "test_kernel_resources.py"
    assert {"ceilings", "graphs", "adapters", "generate", "sanitizer memcheck"} <= set(UNITS)
    assert sum(name.startswith("sweep ") for name in UNITS) == len(sweep.regimes())


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("ceilings", "ceilings.csv"),
        ("bench copy_blocks 0", "copy_blocks.csv"),
        ("bench merge_attention 0", "merge_attention.csv"),
        ("generate", "generate.csv"),
    ],
)
def test_a_dry_run_writes_rows(name: str, file: str, context: Any) -> None:
    assert gpu.run_unit(UNITS[name], context) == 0
    rows = runner.read_rows(context.folder / file)
    assert rows
    assert all(row["device"] and row["commit"] and row["date"] for row in rows)
    assert gpu.Log(context).rows()[name]["outcome"] == "ok"


def test_kernels_run_in_the_interpreter_in_processes_of_their_own(context: Any) -> None:
    chosen = [UNITS["sanitizer memcheck"], UNITS["sweep decode head_dim 64 block 16"], UNITS["numerics test_rows.py"]]
    assert gpu.run_slice(chosen, context) == []
    log = gpu.Log(context)
    assert all(log.done(unit) for unit in chosen)
    rows = runner.read_rows(context.folder / "constants.csv")
    assert len(rows) == 2
    assert sum(bool(row["reason"]) for row in rows) == 1
    assert all(float(row["p50_us"]) > 0 for row in rows)


def fail(context: Any) -> None:
    raise ValueError("no luck")


def skip(context: Any) -> None:
    raise gpu.SkippedError("no tool")


def test_what_fails_is_noted_and_what_cannot_run_is_skipped(context: Any) -> None:
    log = gpu.Log(context)
    unit = gpu.Unit("bad", 1, fail)
    with pytest.raises(ValueError, match="no luck"):
        gpu.run_unit(unit, context)
    assert log.rows()["bad"]["note"] == "ValueError: no luck"
    assert not log.done(unit)
    unit = gpu.Unit("missing", 1, skip)
    assert gpu.run_unit(unit, context) == 4
    assert log.rows()["missing"]["note"] == "no tool"
    assert log.done(unit)


def test_what_is_done_is_not_repeated_until_sources_change(
    context: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = UNITS["ceilings"]
    assert gpu.run_unit(unit, context) == 0
    assert gpu.run_slice([unit], context) == []
    assert "done before: ceilings" in capsys.readouterr().out
    assert gpu.Log(context).done(unit)
    monkeypatch.setattr(gpu, "fingerprint", lambda: "another")
    assert not gpu.Log(context).done(unit)


def test_a_slice_ends_in_time(context: Any) -> None:
    assert gpu.run_slice([dataclasses.replace(UNITS["ceilings"], seconds=100)], context, seconds=0.0) == ["ceilings"]
    unit = UNITS["generate"]  # takes longer than the tenth of a second it gets
    assert gpu.run_slice([dataclasses.replace(unit, seconds=0)], context, seconds=0.1) == ["generate"]
    assert gpu.Log(context).rows()["generate"]["outcome"] == "timeout"


def test_a_crashed_process_is_noted(context: Any) -> None:
    assert gpu.run_slice([gpu.Unit("no such unit", 1, fail)], context) == ["no such unit"]
    assert "exit code" in gpu.Log(context).rows()["no such unit"]["note"]


def test_the_command_names_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--list", "--dry-run", "--results", str(tmp_path)]) == 0
    assert "slice 1, about" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--slice", "99"])
    assert "got 99, needs 1 to" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert gpu.main(["--slice", "1", "--results", str(tmp_path)]) == 2
        assert "needs a GPU" in capsys.readouterr().err
