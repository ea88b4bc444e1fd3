"""`make gpu` without a GPU: its jobs, how they are resumed, a dry run, and the harness on a fake device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python

from benchmarks import gpu
from benchmarks.harness import registry, runner, tables

pytestmark = pytest.mark.usefixtures("plain_empty")


@pytest.fixture
def options(tmp_path: Path) -> gpu.Options:
    return gpu.Options(tmp_path, dry=True)


def code_job(code: str, name: str = "one") -> gpu.Job:
    return gpu.Job("check", name, ("-c", code))


def test_jobs_hold_every_operator_and_the_worthiest_come_first(options: gpu.Options) -> None:
    found = gpu.jobs(options)
    assert len({job.name for job in found}) == len(found)
    assert list(dict.fromkeys(job.step for job in found)) == list(gpu.STEPS)
    assert {f"rest {benchmark.op}" for benchmark in registry.discover()} <= {job.name for job in found}
    for op, count in gpu.DECISIVE.items():
        assert 0 < count <= len(registry.discover([op])[0].of("cuda", False))


def test_a_dry_run_writes_rows_and_is_not_repeated(options: gpu.Options, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = [job for job in gpu.jobs(options) if job.name == "rest copy_blocks"]
    assert gpu.run(chosen, options, 300) == []
    rows = tables.read_rows(options.folder / "copy_blocks.csv")
    assert rows
    assert all(row["device"] and row["commit"] and row["date"] for row in rows)
    assert gpu.run(chosen, options, 300) == []
    assert "done before: rest copy_blocks" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep sweep_decode", "sweep sweep_prefill", "generate", "tests operators", "check"])
def test_every_other_kind_of_job_runs_dry(name: str, options: gpu.Options) -> None:
    chosen = [job for job in gpu.jobs(options) if job.name == name]
    assert gpu.run(chosen, options, 300) == []
    if name.startswith("sweep"):
        rows = tables.read_rows(options.folder / f"{name.split()[-1]}.csv")
        assert len(rows) == 3
        assert all(row["p50_us"] for row in rows)


def test_what_is_done_runs_again_once_sources_change(options: gpu.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.run([code_job("")], options, 60) == []
    assert gpu.outcome_of("one", options) == "ok"
    monkeypatch.setattr(gpu, "has_changed", lambda *_: True)
    assert gpu.outcome_of("one", options) == ""


def test_what_fails_hangs_or_has_no_time_is_left_and_stops_nothing(options: gpu.Options) -> None:
    hangs = code_job("import time; time.sleep(60)", "hangs")
    fails = [code_job("raise SystemExit(3)", "fails"), code_job("import os; os.abort()", "crashes")]
    assert gpu.run([*fails, code_job("", "works")], options, 60) == ["fails", "crashes"]
    assert gpu.run([hangs, code_job("", "late")], options, 0.3) == ["hangs", "late"]
    outcomes = [gpu.outcome_of(name, options) for name in ("fails", "crashes", "works", "hangs", "late")]
    assert outcomes == ["exit code 3", "exit code -6", "ok", "timeout", ""]


def test_shares_of_a_job_run_side_by_side_and_one_failure_is_its_own() -> None:
    code = "import os, sys; sys.exit(7 if os.environ['PC_SHARE'] == '1/2' else 0)"
    assert gpu.run_job(gpu.Job("tests", "two", ("-c", code), 2), 60) == 7


def test_processes_that_compile_make_the_first_calls_between_them(
    options: gpu.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    (benchmark,) = registry.discover(["merge_attention"])
    given, made = ("merge_attention", benchmark.of("cpu", True)[0].name), []
    calls = list(gpu._first_calls(list(given), options))
    assert len(calls) == len(benchmark.providers)
    calls[0]()
    monkeypatch.setattr(gpu, "_first_calls", lambda *_: [lambda n=n: made.append(n) for n in range(5)])
    for share in ("0/2", "1/2"):
        monkeypatch.setenv("PC_SHARE", share)
        assert gpu.compile_share(*given, options) == 0
    assert sorted(made) == list(range(5))


def collected(code: str, **environment: str) -> str:
    """Return the output of `pytest.main`, which `code` calls in its own process."""
    return python("-c", f"import sys, pytest; {code}", cwd=registry.ROOT, **environment).stdout


@pytest.mark.slow
def test_tests_run_in_shares_that_together_are_all() -> None:
    code = "sys.exit(pytest.main(['-q', '--collect-only', 'tests/test_numbers.py']))"
    shares = [collected(code, PC_SHARE=share) for share in ("0/2", "1/2", "0/1")]
    first, second, everything = ({line for line in text.splitlines() if "::" in line} for text in shares)
    assert first
    assert second
    assert not first & second
    assert first | second == everything


@pytest.mark.slow
def test_a_test_file_that_needs_what_is_absent_is_left_out_only_where_asked() -> None:
    code = "import glob, importlib.util as u; find = u.find_spec; "
    code += "u.find_spec = lambda name, *rest: None if name == 'hypothesis' else find(name, *rest); "
    code += "sys.exit(pytest.main(['-q', '--collect-only', *glob.glob('tests/cache/test_r*')]))"
    bare, whole = collected(code, PC_BARE="1"), collected(code, PC_BARE="")
    assert "test_rollback.py" in bare
    assert "test_runs.py" not in bare
    assert "test_runs.py" in whole


def test_the_command_names_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--list", "--dry-run", "--results", str(tmp_path)]) == 0
    assert "decisive paged_attention: not yet" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert gpu.main(["--results", str(tmp_path)]) == 2
        assert "needs a GPU" in capsys.readouterr().err


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once, since nothing runs asynchronously."""

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        """Return at once, since there is only one stream."""


class FakeGraph:
    def replay(self) -> None:
        time.sleep(1e-5)


class FakeDevice:
    """The part of torch.cuda that the harness uses. `dead`: a kernel failed. `capturing`: a graph is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead = self.capturing = False
        nothing = contextlib.nullcontext
        fakes = {"Event": FakeEvent, "Stream": FakeStream, "CUDAGraph": FakeGraph, "current_stream": FakeStream}
        fakes |= {"stream": lambda stream: nothing(), "graph": self.graph, "synchronize": self.synchronize}
        fakes |= {"empty_cache": lambda: None, "get_device_name": lambda: "Fake GPU"}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        from benchmarks.harness import ceilings

        monkeypatch.setattr(runner, "measure_ceilings", lambda *_: ceilings.Ceilings(1e12, 1e14))

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def synchronize(self, device: Any = None) -> None:
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


class FakeInputs:
    bytes, flops = 10**6, 10**6

    def __init__(self) -> None:
        self.calls = list(range(8))

    def check(self, call: int, run: Any) -> float:
        run()
        return 0.0


def fake_benchmark(op: str, **bodies: Any) -> Any:
    """Return three cases of an operator and its providers by name, each with a function that a call runs."""
    providers = tuple(
        registry.Provider(name, lambda call, body=body: body, lambda: "1")
        for name, body in {"pc": abs, **bodies}.items()
    )
    cases = tuple(registry.Case(name, lambda *_: FakeInputs(), True, "cuda") for name in ("one", "two", "three"))
    return registry.Benchmark(op, cases, tuple(dataclasses.replace(p, device=None) for p in providers))


def run_fake(benchmark: Any, **given: Any) -> dict[tuple[str, str], Any]:
    rows = runner.run_case(benchmark, benchmark.cases[0], 0.02, tiny=True, **given)
    return {(row["provider"], row["mode"]): row for row in rows}


def test_on_a_gpu_providers_are_timed_eagerly_and_in_graphs(device: FakeDevice) -> None:
    def no_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 17 GiB")

    def no_graph() -> None:
        if device.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def no_version() -> str:
        raise RuntimeError("no platform")

    benchmark = fake_benchmark("op", pc=lambda: None, large=no_memory, eager=no_graph, other=lambda: None)
    broken = registry.Provider("broken", lambda call: abs, no_version)
    rows = run_fake(dataclasses.replace(benchmark, providers=(*benchmark.providers, broken)), without="oth")
    assert {key for key, row in rows.items() if row.get("p50_us")} == {
        ("pc", "eager"),
        ("pc", "graph"),
        ("eager", "eager"),
    }
    assert rows["large", ""]["note"].startswith("fails: OutOfMemoryError: CUDA out of memory")
    assert rows["eager", "eager"]["note"].startswith("no CUDA graph: RuntimeError")
    assert rows["broken", ""]["note"] == "fails: RuntimeError: no platform"
    assert {row["device"] for row in rows.values()} == {"Fake GPU"}


def test_of_a_slow_provider_two_inputs_do(device: FakeDevice) -> None:
    benchmark = fake_benchmark("op", pc=lambda: None, slow=lambda: time.sleep(0.01))
    counts = [len(runner._prepare(p, FakeInputs(), torch.device("cuda"), 0.1)[0]) for p in benchmark.providers]
    assert counts == [8, 2]


@pytest.fixture
def measured(device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measure a fake benchmark in this process; return the exit code and its rows."""
    monkeypatch.setattr(gpu, "compile_first", lambda *_: None)
    options = gpu.Options(tmp_path, dry=False)

    def measure(benchmark: Any) -> tuple[int, list[tables.Row]]:
        monkeypatch.setattr(gpu, "benchmarks", lambda: {benchmark.op: benchmark})
        code = gpu.bench(benchmark.op, 0, options)
        device.dead = False
        return code, tables.read_rows(tmp_path / "fake-gpu" / f"{benchmark.op}.csv")

    return measure


def test_a_rival_that_loses_the_device_is_left_out_by_the_next_process(device: FakeDevice, measured: Any) -> None:
    def astray() -> None:
        device.dead = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    benchmark = fake_benchmark("op", pc=lambda: None, astray=astray, other=lambda: None)
    codes = [measured(benchmark)[0] for _ in range(3)]
    code, rows = measured(benchmark)
    assert [*codes, code] == [gpu.DEVICE_LOST] * 3 + [0]
    timed = {row["case"] for row in rows if row["provider"] == "other" and row["mode"] == "graph"}
    assert timed == {"one", "two", "three"}
    assert all(row["note"].startswith(gpu.LOST) for row in rows if row["provider"] == "astray")


def test_a_case_that_fails_is_noted_and_does_not_stop_the_others(measured: Any) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no luck")

    benchmark = fake_benchmark("op", pc=lambda: None)
    one, two, three = benchmark.cases
    benchmark = dataclasses.replace(benchmark, cases=(one, dataclasses.replace(two, build=fail), three))
    for _ in range(2):  # the second time nothing is left to measure, and it still counts as failed
        code, rows = measured(benchmark)
        assert code == 1
        notes = {row["case"]: row.get("note", "") for row in rows}
        assert notes == {"one": "", "two": "fails: no luck", "three": ""}


def test_the_interpreter_of_the_oldest_triton_takes_the_newest_numpy() -> None:
    """numpy 2.5 raises where earlier versions warn: int() of an array with one element."""
    folder = registry.ROOT / ".kernels" / "triton-3.6.0"
    if not folder.is_dir():
        pytest.skip("make .kernels/triton-3.6.0")
    path = os.pathsep.join((str(folder), *filter(None, (os.environ.get("PYTHONPATH"),))))
    code = "import torch, triton, pc; one = lambda *n: torch.tensor(n, dtype=torch.int32); "
    code += "assert triton.__version__ == '3.6.0'; pc.attention_plan(one(0, 1)[None], one(20), one(0, 1), 16)"
    options = ("-W", "error:Conversion of an array:DeprecationWarning", "-c", code)
    python(*options, cwd=registry.ROOT, PYTHONPATH=path, TRITON_INTERPRET="1")
