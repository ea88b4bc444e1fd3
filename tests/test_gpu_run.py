"""`make gpu` without a GPU: how it is cut and resumed, and a dry run of every kind of unit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import run as gpu
from benchmarks.gpu import small, sweep
from benchmarks.harness import registry, runner, tables

HALF_HOUR = 1800

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


def test_what_decides_comes_first_and_fits_half_an_hour() -> None:
    staged = [unit.stage for unit in UNITS.values()]
    first = staged[: staged.index("")]
    assert list(dict.fromkeys(first)) == list(gpu.STAGES)
    assert not any(staged[len(first) :])
    assert HALF_HOUR - 180 < sum(unit.seconds for unit in UNITS.values() if unit.stage) <= HALF_HOUR
    assert UNITS["bench paged_attention 0"].stage == "decisive"


def test_a_measurement_is_repeated_when_the_constants_change_and_a_sweep_is_not(
    context: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = gpu.Log(context)
    names = ("sweep decode head_dim 128 block 16", "bench paged_attention 0")
    for name in names:
        log.put(name, "ok", 1)
    assert [log.done(name) for name in names] == [True, True]
    monkeypatch.setattr(sweep, "TABLE", tmp_path / "tuned.py")
    sweep.TABLE.write_text("TILES = {}\n")
    assert [log.done(name) for name in names] == [True, False]


def test_the_swept_constants_are_among_the_results(context: Any) -> None:
    regime = sweep.regimes(tiny=True)[0]
    tiles = {"block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 3, "two_loops": 1, "max_registers": 0}
    row = {"regime": regime.key, "architecture": "sm_90", "kind": "decode", "group": "4", "head_dim": "128"}
    row |= {"block_size": "16", "present": "0", "reason": "fastest of 2", "p50_us": "1.0", "programs": "4"}
    row |= {name: str(value) for name, value in tiles.items()} | {"device": "Fake", "date": "2026-01-01"}
    sweep.save_sweep(context.folder / "constants.csv", [row])
    before = sweep.TABLE.read_bytes()
    assert gpu.run_unit(UNITS["constants"], context) == 0
    found: dict[str, Any] = {}
    exec((context.folder / "tuned.py").read_text(), found)
    assert found["TILES"]["sm_90", "decode", 128, 4, 16][0] == (16, 32, 4, 3, True)
    assert sweep.TABLE.read_bytes() == before


def test_charts_of_what_was_measured_are_among_the_results(context: Any) -> None:
    measured = registry.ROOT / "benchmarks" / "results" / "cpu" / "copy_blocks.csv"
    context.folder.mkdir(parents=True)
    (context.folder / measured.name).write_bytes(measured.read_bytes())
    assert gpu.run_unit(UNITS["pages"], context) == 0
    assert "<svg" in (context.folder / "charts" / "copy_blocks.svg").read_text()


def test_units_hold_every_operator_every_case_and_every_test_file() -> None:
    for benchmark in registry.discover():
        parts = [name for name in UNITS if name.startswith(f"bench {benchmark.op} ")]
        assert (
            (len(parts) - 1) * gpu.CASES_PER_UNIT < len(benchmark.of("cuda", False)) <= len(parts) * gpu.CASES_PER_UNIT
        )
    files = [name for kind in ("attention", "others") for name in UNITS[f"numerics {kind}"].run.keywords["files"]]
    paths = (registry.ROOT / "tests" / "triton_ops").glob("test_*.py")
    assert sorted([*files, "test_kernel_resources.py"]) == sorted(path.name for path in paths)
    assert {"ceilings", "graphs", "adapters", "generate", "sanitizer memcheck", "sanitizer initcheck"} <= set(UNITS)
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
    rows = tables.read_rows(context.folder / file)
    assert rows
    assert all(row["device"] and row["commit"] and row["date"] for row in rows)
    assert gpu.Log(context).rows()[name]["outcome"] == "ok"


def test_a_small_call_of_every_operator_is_right() -> None:
    said: list[str] = []
    small.run_small(None, torch.device("cpu"), said.append)
    assert {line.partition(",")[0] for line in said} == {benchmark.op for benchmark in registry.discover()}


@pytest.mark.slow
def test_kernels_run_in_the_interpreter_in_processes_of_their_own(context: Any) -> None:
    chosen = [UNITS["sanitizer memcheck"], UNITS["sweep decode head_dim 64 block 16"], UNITS["numerics others"]]
    assert gpu.run_slice(chosen, context) == []
    log = gpu.Log(context)
    assert all(log.done(unit.name) for unit in chosen)
    rows = tables.read_rows(context.folder / "constants.csv")
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
    assert not log.done(unit.name)
    unit = gpu.Unit("missing", 1, skip)
    assert gpu.run_unit(unit, context) == 4
    assert log.rows()["missing"]["note"] == "no tool"
    assert log.done(unit.name)


def test_what_is_done_is_not_repeated_until_sources_change(
    context: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = UNITS["ceilings"]
    assert gpu.run_unit(unit, context) == 0
    assert gpu.run_slice([unit], context) == []
    assert "done before: ceilings" in capsys.readouterr().out
    assert gpu.Log(context).done(unit.name)
    monkeypatch.setattr(gpu, "fingerprint", lambda _: "another")
    assert not gpu.Log(context).done(unit.name)


def test_a_slice_ends_in_time(context: Any) -> None:
    assert gpu.run_slice([dataclasses.replace(UNITS["ceilings"], seconds=100)], context, seconds=0.0) == ["ceilings"]
    unit = UNITS["generate"]  # takes longer than the tenth of a second it gets
    assert gpu.run_slice([dataclasses.replace(unit, seconds=0)], context, seconds=0.1) == ["generate"]
    assert gpu.Log(context).rows()["generate"]["outcome"] == "timeout"


def test_a_crashed_process_is_noted(context: Any) -> None:
    assert gpu.run_slice([gpu.Unit("no such unit", 1, fail)], context) == ["no such unit"]
    assert "exit code" in gpu.Log(context).rows()["no such unit"]["note"]


@pytest.mark.slow
def test_results_are_packed_after_every_unit_and_unpacked_elsewhere(context: Any, tmp_path: Path) -> None:
    packed = tmp_path / "out" / "slice.tar.gz"
    bad = gpu.Unit("no such unit", 1, fail)
    assert gpu.run_slice([UNITS["ceilings"], bad], context, packed=packed) == ["no such unit"]
    elsewhere = tmp_path / "elsewhere"
    assert gpu.main(["--unpack", str(packed), "--results", str(elsewhere)]) == 0
    for name in ("ceilings.csv", "run.csv"):
        assert (elsewhere / "cpu" / name).read_bytes() == (context.folder / name).read_bytes()
    outcomes = gpu.Log(dataclasses.replace(context, results=elsewhere)).rows()
    assert [outcomes[name]["outcome"] for name in ("ceilings", "no such unit")] == ["ok", "failed"]


def collected(code: str, **environment: str) -> str:
    """What `pytest.main` prints, run by `code` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, pytest; {code}"],
        cwd=registry.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


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
    code += "sys.exit(pytest.main(['-q', '--collect-only', *glob.glob('tests/triton_ops/test_sparse*')]))"
    bare, whole = collected(code, PC_BARE="1"), collected(code, PC_BARE="")
    assert "test_sparse_gap_attention.py" in bare
    assert "test_sparse_gap_attention_random.py" not in bare
    assert "test_sparse_gap_attention_random.py" in whole


def test_a_process_that_compiles_for_ever_is_ended() -> None:
    from benchmarks.gpu import ahead

    commands = [[sys.executable, "-c", "import time; time.sleep(60)"], [sys.executable, "-c", "raise SystemExit(3)"]]
    assert ahead.in_shares(commands, 3.0) == [124, 3]


def test_bars_of_a_decode_go_with_the_memory_of_the_device(tmp_path: Path) -> None:
    from benchmarks.gpu import bars

    rows = "case,provider,mode,p50_us,flops,device\ndecode 1x4k,pc,graph,19,0,{}\n"
    for device, line in (
        ("NVIDIA H200", "not met: decode 1x4k, 19 us, at most 14"),
        ("NVIDIA H100 80GB HBM3", "met: decode 1x4k, 19 us, at most 20"),
    ):
        (tmp_path / "paged_attention.csv").write_text(rows.format(device))
        assert line in bars.check_bars(tmp_path)


def test_the_command_names_what_it_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--list", "--dry-run", "--results", str(tmp_path)]) == 0
    assert "slice 1, about" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--slice", "99"])
    assert "got 99, needs 1 to" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert gpu.main(["--slice", "1", "--results", str(tmp_path)]) == 2
        assert "needs a GPU" in capsys.readouterr().err


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        """There is one stream."""


class FakeGraph:
    def replay(self) -> None:
        time.sleep(1e-5)


class FakeDevice:
    """torch.cuda, as far as the harness uses it: `dead` once a kernel went astray, `capturing` within a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead = self.capturing = False
        nothing = contextlib.nullcontext
        fakes = {"Event": FakeEvent, "Stream": FakeStream, "CUDAGraph": FakeGraph, "current_stream": FakeStream}
        fakes |= {"stream": lambda stream: nothing(), "graph": self.graph, "synchronize": self.synchronize}
        fakes |= {"empty_cache": lambda: None, "get_device_name": lambda: "Fake GPU"}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        from benchmarks.harness import ceilings

        monkeypatch.setattr(runner, "measure_ceilings", lambda *_: ceilings.Ceilings(1e12, 1e14, "bfloat16"))

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
    """Three cases of an operator; providers by name, each with what a call of it does."""
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


def test_a_rival_that_loses_the_device_is_left_out_by_the_next_process(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def astray() -> None:
        device.dead = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    benchmark = fake_benchmark("op", pc=lambda: None, astray=astray, other=lambda: None)
    monkeypatch.setattr(gpu, "discover", lambda names: [benchmark])
    context = gpu.Context(tmp_path, dry=False)
    unit = gpu.Unit("bench op 0", 1, functools.partial(gpu._bench, op="op", part=0))
    codes = []
    for _ in range(4):
        codes.append(gpu.run_unit(unit, dataclasses.replace(context, resumed=bool(codes))))
        device.dead = False
    assert codes == [gpu.RESUME] * 3 + [0]
    rows = tables.read_rows(tmp_path / "fake-gpu" / "op.csv")
    assert {row["case"] for row in rows if row["provider"] == "other" and row["mode"] == "graph"} == {
        "one",
        "two",
        "three",
    }
    assert all(row["note"].startswith("loses the device: ") for row in rows if row["provider"] == "astray")


@pytest.mark.slow
def test_a_case_that_fails_does_not_stop_the_others(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = fake_benchmark("op", pc=lambda: None)
    bad = registry.Case("two", lambda *_: fail(None), True, "cuda")
    benchmark = dataclasses.replace(benchmark, cases=(benchmark.cases[0], bad, benchmark.cases[2]))
    monkeypatch.setattr(gpu, "discover", lambda names: [benchmark])
    context = gpu.Context(tmp_path, dry=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed: two"):
            gpu._bench(context, "op", 0)
    log = gpu.Log(context)
    assert [log.done(f"bench op 0: {name}") for name in ("one", "two", "three")] == [True, False, True]
    assert log.rows()["bench op 0: two"]["note"] == "ValueError: no luck"


def test_bars(tmp_path: Path) -> None:
    from benchmarks.gpu import bars

    columns = "case,provider,mode,p50_us,flops\n"
    (tmp_path / "paged_attention.csv").write_text(
        columns
        + "decode 1x4k,pc,graph,13.5,0\ndecode 1x4k,pc,eager,50,0\ndecode 8x4k,pc,graph,45,0\n"
        + "prefill 1x4k,pc,graph,250,137438953472\n"
    )
    (tmp_path / "sparse_gap_attention.csv").write_text(
        columns + "holes,pc,graph,12,0\nholes,compaction + pc.paged_attention,graph,10,0\n"
    )
    lines = bars.check_bars(tmp_path)
    assert "met: decode 1x4k, 13.5 us, at most 14" in lines
    assert "not met: decode 8x4k, 45 us, at most 39" in lines
    assert "met: prefill 1x4k, 550 TFLOP/s, at least 500" in lines
    assert "not met: gap over compaction, holes, 1.2 times, at most 1.1" in lines
    assert lines[0] == "missing: decode 1x1k, us, at most 11"
    assert set(bars.DECODE) | set(bars.PREFILL) <= {
        case.name.split(" ", 1)[1] for case in registry.discover(["paged_attention"])[0].of("cuda", False)
    }


def test_the_interpreter_of_the_oldest_triton_takes_the_newest_numpy() -> None:
    """numpy 2.5 refuses what earlier ones warn of: int() on an array of one element."""
    folder = registry.ROOT / ".kernels" / "triton-3.6.0"
    if not folder.is_dir():
        pytest.skip("make .kernels/triton-3.6.0")
    path = os.pathsep.join((str(folder), *filter(None, (os.environ.get("PYTHONPATH"),))))
    code = "import torch, triton, pc; one = lambda *n: torch.tensor(n, dtype=torch.int32); "
    code += "assert triton.__version__ == '3.6.0'; pc.attention_plan(one(0, 1)[None], one(20), one(0, 1), 16)"
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error:Conversion of an array:DeprecationWarning", "-c", code]
    subprocess.run(command, cwd=registry.ROOT, env=environment, check=True)
