"""`make gpu`: everything that only a GPU can tell, in slices of at most nine minutes that can be resumed.

    python benchmarks/gpu.py --list             units, slices and what is done
    python benchmarks/gpu.py --slice 3          one slice; again: what is left of it
    python benchmarks/gpu.py                    all slices
    python benchmarks/gpu.py --dry-run          every kind of unit on the CPU, small, results thrown away

Each unit is a process of its own, so that one that crashes takes nothing with it. What is done stands in
results/<device>/run.csv with a fingerprint of the sources: a unit is repeated when they change.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

if __name__ == "__main__":
    from pc.bench import PACKAGE, load_benchmarks

    load_benchmarks()
    sys.exit(importlib.import_module(f"{PACKAGE}.gpu").main())

import torch

from . import generate, runner, sweep
from .ceilings import measure_ceilings
from .conditions import SOURCES, conditions, device_folder
from .peers import add_peers
from .registry import ROOT, discover

SLICE_SECONDS = 530
# A slice is planned shorter than it may take, since estimates are only that.
PLANNED_SECONDS = 440
CASES_PER_UNIT = 8
TOOLS = ("memcheck", "racecheck", "synccheck")


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a run writes and what it runs on."""

    results: Path
    dry: bool
    peers: Path | None = None

    @property
    def kind(self) -> str:
        """Kind of device."""
        return "cpu" if self.dry else "cuda"

    @property
    def folder(self) -> Path:
        """Of this device's results."""
        return self.results / device_folder(self.kind)


class SkippedError(Exception):
    """A unit cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """A piece of work.

    Attributes:
        name: Unique, "bench paged_attention 2".
        seconds: Estimated, on an H200 with nothing compiled yet.
        run: Does it; raises SkippedError, or anything else where it fails.
        kernels: Whether a dry run needs the interpreter.
    """

    name: str
    seconds: int
    run: Callable[[Context], None]
    kernels: bool = False


def _command(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])}: exit code {done.returncode}")


def _pytest(context: Context, *arguments: str) -> None:
    parallel = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    extra = ("--collect-only", "-q") if context.dry else ("-q", *parallel)
    _command(sys.executable, "-m", "pytest", *extra, *arguments)


def _ceilings(context: Context) -> None:
    found = measure_ceilings(context.kind, context.dry)
    row = {"copy_gbs": f"{found.copy / 1e9:.1f}", "matmul_tflops": f"{found.matmul / 1e12:.2f}", "dtype": found.dtype}
    _write(context.folder / "ceilings.csv", [row | conditions(context.kind)])


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _numerics(context: Context, file: str) -> None:
    # On a GPU every kernel test runs there, the interpreter's too.
    _pytest(context, f"tests/triton_ops/{file}")


def _graphs(context: Context) -> None:
    _pytest(context, "tests", "-m", "gpu", "-k", "graph")


def _adapters(context: Context) -> None:
    _pytest(context, "tests/cache", "tests/integrations", "-m", "gpu")


def _sanitizer(context: Context, tool: str) -> None:
    command = (sys.executable, "benchmarks/small.py")
    if context.dry:
        _command(*command)
        return
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        raise SkippedError("compute-sanitizer is not installed")
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else an access past one tensor lands in another unseen
    _command(found, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *command)


def _sweep(context: Context, key: str) -> None:
    regime = next(regime for regime in sweep.regimes(context.dry) if regime.key == key)
    rows = sweep.sweep_regime(
        regime, torch.device(context.kind), 0.1 if context.dry else 20, 2 if context.dry else None
    )
    sweep.save_sweep(context.folder / "constants.csv", rows)


def _bench(context: Context, op: str, part: int) -> None:
    (benchmark,) = discover([op])
    if context.peers is not None:
        add_peers(context.peers)
    cases = benchmark.of(context.kind, False)[part * CASES_PER_UNIT : (part + 1) * CASES_PER_UNIT]
    for case in benchmark.of("cpu", True)[:1] if context.dry else cases:
        rows = runner.run_case(benchmark, case, 0.02 if context.dry else 1.5, tiny=context.dry)
        runner.save_rows(runner.results_path(context.results, context.kind, op), benchmark, rows)
        print(f"{op}: {case.name}", flush=True)


def _generate(context: Context) -> None:
    size = (
        ("tiny", torch.device("cpu"), 64, 16, 4, 2) if context.dry else ("1B", torch.device("cuda"), 8192, 64, 128, 6)
    )
    generate.save_generate(context.folder / "generate.csv", generate.run_generate(*size))


def units() -> list[Unit]:
    """Everything, in the order of its worth: numbers must be right before they are fast."""
    tests = sorted(path.name for path in (ROOT / "tests" / "triton_ops").glob("test_*.py"))
    tests.remove("test_kernel_resources.py")  # compiles without a GPU, as everywhere
    found = [
        Unit("ceilings", 15, _ceilings),
        *(
            Unit(f"numerics {name}", 90 if "attention" in name else 45, functools.partial(_numerics, file=name))
            for name in tests
        ),
        Unit("graphs", 60, _graphs),
        Unit("adapters", 60, _adapters),
        *(Unit(f"sanitizer {tool}", 120, functools.partial(_sanitizer, tool=tool), True) for tool in TOOLS),
    ]
    for benchmark in discover():
        count = len(benchmark.of("cuda", False))
        for part in range(-(-count // CASES_PER_UNIT)):
            cases = min(CASES_PER_UNIT, count - part * CASES_PER_UNIT)
            seconds = 15 + cases * (12 if "attention" in benchmark.op else 4)
            run = functools.partial(_bench, op=benchmark.op, part=part)
            found.append(Unit(f"bench {benchmark.op} {part}", seconds, run))
    found.append(Unit("generate", 120, _generate))
    found += [Unit(f"sweep {r.key}", 120, functools.partial(_sweep, key=r.key), True) for r in sweep.regimes()]
    return found


def slices(all_units: Iterable[Unit]) -> list[list[Unit]]:
    """The units in order, cut so that no slice is planned longer than PLANNED_SECONDS."""
    found: list[list[Unit]] = []
    for unit in all_units:
        if not found or sum(u.seconds for u in found[-1]) + unit.seconds > PLANNED_SECONDS:
            found.append([])
        found[-1].append(unit)
    return found


@functools.cache
def fingerprint() -> str:
    """Of the sources and tests that a result depends on."""
    total = hashlib.sha256()
    for pattern in (*SOURCES, "tests/triton_ops"):
        paths = ROOT.glob(pattern) if "*" in pattern else (ROOT / pattern).rglob("*.py")
        for path in sorted(paths):
            total.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:12]


class Log:
    """results/<device>/run.csv: the last outcome of each unit."""

    COLUMNS = ("unit", "outcome", "seconds", "note", "fingerprint")

    def __init__(self, context: Context) -> None:
        self.kind, self.path = context.kind, context.folder / "run.csv"

    def rows(self) -> dict[str, dict[str, str]]:
        """By unit."""
        return {row["unit"]: row for row in runner.read_rows(self.path)}

    def done(self, unit: Unit) -> bool:
        """Whether it was done, or cannot be, with the sources as they are."""
        row = self.rows().get(unit.name, {})
        return row.get("fingerprint") == fingerprint() and row.get("outcome") in ("ok", "skipped")

    def put(self, unit: Unit, outcome: str, seconds: float, note: str = "") -> None:
        """Notes an outcome in the place of an earlier one."""
        row = dict(zip(self.COLUMNS, (unit.name, outcome, f"{seconds:.0f}", note, fingerprint()), strict=True))
        _write(self.path, list((self.rows() | {unit.name: row | conditions(self.kind)}).values()))


def run_unit(unit: Unit, context: Context) -> int:
    """In this process: 0 ok, 1 failed, 4 skipped."""
    log, start = Log(context), time.perf_counter()
    try:
        unit.run(context)
    except SkippedError as error:
        log.put(unit, "skipped", time.perf_counter() - start, str(error))
        return 4
    except Exception as error:
        log.put(unit, "failed", time.perf_counter() - start, f"{type(error).__name__}: {str(error)[:200]}")
        raise
    log.put(unit, "ok", time.perf_counter() - start)
    return 0


def run_slice(chosen: list[Unit], context: Context, seconds: float = SLICE_SECONDS, again: bool = False) -> list[str]:
    """Runs what is not done, each unit in a process of its own, while there is time; the names of what is left."""
    log, end, left = Log(context), time.perf_counter() + seconds, []
    for unit in chosen:
        if log.done(unit) and not again:
            print(f"done before: {unit.name}")
            continue
        remaining = end - time.perf_counter()
        if remaining < min(unit.seconds, seconds / 2):  # a part of a unit is worth nothing
            left.append(unit.name)
            continue
        print(f"== {unit.name} ({remaining:.0f} s left)", flush=True)
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--unit", unit.name]
        command += ["--results", str(context.results), *(["--dry-run"] if context.dry else [])]
        command += ["--peers", str(context.peers)] if context.peers else []
        start = time.perf_counter()
        environment = {**os.environ, "TRITON_INTERPRET": "1"} if context.dry and unit.kernels else None
        with subprocess.Popen(command, cwd=ROOT, start_new_session=True, env=environment) as process:
            try:
                code = process.wait(remaining)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                log.put(unit, "timeout", time.perf_counter() - start)
                code = 124
        if code not in (0, 4):
            left.append(unit.name)
            if log.rows().get(unit.name, {}).get("fingerprint") != fingerprint():
                log.put(unit, "failed", time.perf_counter() - start, f"exit code {code}")
    return left


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code is 0 when nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", type=int, help="which slice, from 1; all when not given")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--only", default="", help="units whose name contains this")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results, or a new folder for a dry run")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers" / "gpu", help="folder of other projects' wheels")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.dry_run:
        torch.set_num_threads(1)
    everything = units()
    parts = slices(everything)
    if given.slice is not None and not 1 <= given.slice <= len(parts):
        parser.error(f"--slice: got {given.slice}, needs 1 to {len(parts)}")
    results = given.results or (Path(tempfile.mkdtemp()) if given.dry_run else ROOT / "benchmarks" / "results")
    context = Context(results, given.dry_run, given.peers if given.peers.is_dir() else None)
    if not given.dry_run and not given.list and not torch.cuda.is_available():
        print("make gpu needs a GPU that PyTorch can use; --dry-run tries the harness without one", file=sys.stderr)
        return 2
    if given.unit:
        return run_unit(next(unit for unit in everything if unit.name == given.unit), context)
    if given.list:
        rows = Log(context).rows() if given.dry_run or torch.cuda.is_available() else {}
        for number, part in enumerate(parts, 1):
            print(f"slice {number}, about {sum(unit.seconds for unit in part)} s")
            for unit in part:
                print(f"    {unit.name}: {rows.get(unit.name, {}).get('outcome', 'not yet')}")
        return 0
    left = []
    for number, part in enumerate(parts, 1):
        if given.slice in (None, number):
            chosen = [unit for unit in part if given.only in unit.name]
            left += run_slice(chosen, context, again=given.again)
    print(f"results in {context.folder}")
    if left:
        print(f"left: {', '.join(left)}; run the same again", file=sys.stderr)
    return 3 if left else 0
