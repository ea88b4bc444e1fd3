"""`make gpu`: everything that only a GPU can tell, in slices of at most nine minutes that can be resumed.

In the order of what decides: whether operators run and are right, the constants that a sweep chooses, the decisive
cases with these constants beside rivals, charts and pages of them, all tests; half an hour holds it. The rest follows.

    python -m benchmarks gpu --list             units, slices and what is done
    python -m benchmarks gpu --slice 3          one slice; again: what is left of it
    python -m benchmarks gpu                    all slices
    python -m benchmarks gpu --dry-run          every kind of unit on the CPU, small, results thrown away
    python -m benchmarks gpu --unpack FILE      results that another machine packed, into benchmarks/results

Each unit is a process of its own, so that one that crashes takes nothing with it. What is done stands in
results/<device>/run.csv with a fingerprint of the sources: a unit is repeated when they change, a measurement when the
constants do too. After every unit all results are packed into one file (--pack).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from ..harness import runner
from ..harness.ceilings import measure_ceilings, published
from ..harness.conditions import SOURCES, conditions, device_folder, device_name
from ..harness.peers import add_peers
from ..harness.registry import OURS, ROOT, discover
from ..harness.tables import read_rows, write_rows
from ..pages.plots import plot_operator
from . import ahead, generate, sweep
from .ahead import CASES_PER_UNIT, device_kind
from .bars import check_bars

SLICE_SECONDS = 530
# A slice is planned shorter than it may take, since estimates are only that.
PLANNED_SECONDS = 500
# No unit may take the whole of a slice from those after it.
MOST_SECONDS = 400
SKIPPED, RESUME, TIMEOUT = 4, 5, 124
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
# What the stages of a run buy, in order; what is measured depends on the constants that the sweep finds.
STAGES = {
    "smoke": "every operator runs and is right: the quick tests",
    "sweep": "constants of decode and prefill at head_dim 128, written into the table",
    "decisive": "decodes, prefills, chunks, windows and holes with these constants, beside the rivals",
    "pages": "charts and pages of all that, drawn on the machine",
    "numerics": "every test of operators, graphs and adapters on the device",
}


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a run writes and what it runs on.

    Attributes:
        results: Folder of all devices' results.
        dry: Everything small, on the CPU.
        peers: Folder of other projects' wheels.
        without: Leaves out rivals whose name contains this.
        resumed: A unit goes on after a provider made the device unusable: what failed is not tried again.
    """

    results: Path
    dry: bool
    peers: Path | None = None
    without: str = ""
    resumed: bool = False

    @property
    def kind(self) -> str:
        """Kind of device."""
        return device_kind(self.dry)

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
        stage: One of STAGES, or empty: after the first half hour.
    """

    name: str
    seconds: int
    run: Callable[[Context], None]
    kernels: bool = False
    stage: str = ""


def _command(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])}: exit code {done.returncode}")


def _pytest(context: Context, *arguments: str) -> None:
    """Shares of the tests in processes of their own, which compile side by side; pytest alone is needed for it."""
    count = 2 if context.dry else ahead.workers()
    extra = ("--collect-only",) if context.dry else ()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *extra, *arguments]
    shares = [{"PC_SHARE": f"{k}/{count}", "PC_BARE": "1"} for k in range(count)]
    codes = ahead.in_shares([command] * count, SLICE_SECONDS, shares)
    failed = {k: code for k, code in enumerate(codes) if code not in (0, 5)}  # 5: no test in this share
    if failed:
        raise RuntimeError(f"pytest {' '.join(arguments)}: exit codes by share {failed}")


def _ceilings(context: Context) -> None:
    found = measure_ceilings(context.kind, context.dry)
    row = {"copy_gbs": f"{found.copy / 1e9:.1f}", "matmul_tflops": f"{found.matmul / 1e12:.2f}", "dtype": found.dtype}
    write_rows(context.folder / "ceilings.csv", [row | published(device_name(context.kind)) | conditions(context.kind)])


def _smoke(context: Context) -> None:
    """The quick tests of every operator; on a GPU kernels are what they run."""
    _pytest(context, "tests/triton_ops", "-m", "not slow", "--ignore", "tests/triton_ops/test_kernel_resources.py")


def _constants(context: Context) -> None:
    """Puts what the sweeps chose into the table that the following units launch by, with a copy among the results."""
    rows = read_rows(context.folder / "constants.csv")
    found = sweep.table(rows, f"{context.folder.name}/constants.csv")
    target = context.folder / "tuned.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(sweep.TABLE, target)
    sweep.write_table(found, target)
    if not context.dry:
        shutil.copy(target, sweep.TABLE)


def _pages(context: Context) -> None:
    """Charts of every operator that was measured, and the pages if the results lie in the tree."""
    charts = context.folder / "charts"
    for benchmark in discover():
        if (source := context.folder / f"{benchmark.op}.csv").exists():
            plot_operator(source, charts / f"{benchmark.op}.svg")
    if context.results == ROOT / "benchmarks" / "results":
        _command(sys.executable, "-m", "benchmarks", "render")


def _numerics(context: Context, files: tuple[str, ...]) -> None:
    # On a GPU every kernel test runs there, the interpreter's too.
    _pytest(context, *(f"tests/triton_ops/{file}" for file in files))


def _graphs(context: Context) -> None:
    _pytest(context, "tests", "-m", "gpu", "-k", "graph")


def _adapters(context: Context) -> None:
    _pytest(context, "tests/cache", "tests/integrations", "-m", "gpu")


def _sanitizer(context: Context, tool: str) -> None:
    command = (sys.executable, "-m", "benchmarks", "small")
    if context.dry:
        _command(*command)
        return
    # Under the tool compilers would run tens of times as long.
    names, count = [benchmark.op for benchmark in discover()], ahead.workers()
    ahead.in_shares([[*command, *names[k::count]] for k in range(min(count, len(names)))])
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        raise SkippedError("compute-sanitizer is not installed")
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else an access past one tensor lands in another unseen
    _command(found, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *command)


def _sweep(context: Context, key: str) -> None:
    regime = next(regime for regime in sweep.regimes(context.dry) if regime.key == key)
    ahead.compile_ahead("sweep", key, dry=context.dry)
    seconds, limit = (0.1, 2) if context.dry else (4, None)
    ceiling = measure_ceilings(context.kind, context.dry)
    columns = {"copy_gbs": f"{ceiling.copy / 1e9:.1f}", "matmul_tflops": f"{ceiling.matmul / 1e12:.2f}"}
    for rows in sweep.sweep_regime(regime, torch.device(context.kind), seconds, limit):
        sweep.save_sweep(context.folder / "constants.csv", [row | columns for row in rows])


def _bench(context: Context, op: str, part: int) -> None:
    """Case by case, each saved and noted when it is done; one that fails does not stop the others."""
    (benchmark,) = discover([op])
    if context.peers is not None:
        add_peers(context.peers)
    log, failed = Log(context), []
    if not context.resumed:
        ahead.compile_ahead("bench", op, str(part), dry=context.dry)
    cases = benchmark.of(context.kind, False)[part * CASES_PER_UNIT : (part + 1) * CASES_PER_UNIT]
    for case in benchmark.of("cpu", True)[:1] if context.dry else cases:
        name, start = f"bench {op} {part}: {case.name}", time.perf_counter()
        if log.done(name, also=("failed",) if context.resumed else ()):
            continue
        seconds, lost = 0.02 if context.dry else 1.5, log.lost(name)
        try:
            rows = runner.run_case(benchmark, case, seconds, None, context.dry, without=context.without, lost=lost)
        except runner.DeviceLostError as error:
            outcome = "failed" if error.provider == OURS else "lost"
            log.put(f"{name}, {error.provider}" if outcome == "lost" else name, outcome, 0, str(error)[:200])
            raise
        except Exception as error:
            failed.append(case.name)
            log.put(name, "failed", time.perf_counter() - start, f"{type(error).__name__}: {str(error)[:200]}")
            runner.still_there(torch.device(context.kind), "timing", error)
            continue
        runner.save_rows(runner.results_path(context.results, context.kind, op), benchmark, rows)
        log.put(name, "ok", time.perf_counter() - start)
        print(f"{op}: {case.name}", flush=True)
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def _generate(context: Context) -> None:
    size = (
        ("tiny", torch.device("cpu"), 64, 16, 4, 2) if context.dry else ("1B", torch.device("cuda"), 8192, 64, 128, 6)
    )
    generate.save_generate(context.folder / "generate.csv", generate.run_generate(*size))


def units() -> list[Unit]:
    """Everything, in the order of its worth: each is useful if the next never runs."""
    tests = sorted(path.name for path in (ROOT / "tests" / "triton_ops").glob("test_*.py"))
    tests.remove("test_kernel_resources.py")  # compiles without a GPU, as everywhere
    attention = tuple(name for name in tests if "attention" in name)
    others = tuple(name for name in tests if name not in attention)
    benches = {}
    for benchmark in discover():
        count = len(benchmark.of("cuda", False))
        for part in range(-(-count // CASES_PER_UNIT)):
            cases = min(CASES_PER_UNIT, count - part * CASES_PER_UNIT)
            seconds = 15 + cases * (12 if "attention" in benchmark.op else 4)
            name, run = f"bench {benchmark.op} {part}", functools.partial(_bench, op=benchmark.op, part=part)
            benches[name] = Unit(name, seconds, run)
    sweeps = [Unit(f"sweep {r.key}", 110, functools.partial(_sweep, key=r.key), True) for r in sweep.regimes()]
    worth = [f"paged_attention {k}" for k in range(3)] + ["sparse_gap_attention 0", "sliding_window_attention 0"]
    first = {
        "smoke": [Unit("ceilings", 15, _ceilings), Unit("smoke", 105, _smoke)],
        "sweep": [*sweeps[:4], Unit("constants", 5, _constants)],
        "decisive": [benches.pop(f"bench {name}") for name in worth],
        "pages": [Unit("pages", 30, _pages)],
        "numerics": [
            Unit("numerics attention", 240, functools.partial(_numerics, files=attention)),
            Unit("numerics others", 180, functools.partial(_numerics, files=others)),
            Unit("graphs", 60, _graphs),
            Unit("adapters", 60, _adapters),
        ],
    }
    staged = [dataclasses.replace(unit, stage=stage) for stage, own in first.items() for unit in own]
    sanitizers = [Unit(f"sanitizer {tool}", 120, functools.partial(_sanitizer, tool=tool), True) for tool in TOOLS]
    last = [Unit("generate", 200, _generate), *benches.values(), *sweeps[4:], *sanitizers]
    return [*staged, *last, Unit("pages of the rest", 30, _pages)]


def slices(all_units: Iterable[Unit]) -> list[list[Unit]]:
    """The units in order, cut so that no slice is planned longer than PLANNED_SECONDS."""
    found: list[list[Unit]] = []
    for unit in all_units:
        if not found or sum(u.seconds for u in found[-1]) + unit.seconds > PLANNED_SECONDS:
            found.append([])
        found[-1].append(unit)
    return found


def fingerprint(unit: str = "") -> str:
    """Of the sources and tests that a result depends on; of a measurement, of the swept constants too."""
    measures = unit.startswith(("bench ", "generate", "pages"))
    return _fingerprint(sweep.TABLE.read_bytes() if measures else b"")


@functools.cache
def _fingerprint(constants: bytes) -> str:
    total = hashlib.sha256(constants)
    for pattern in (*SOURCES, "tests/triton_ops"):
        paths = (ROOT / pattern.removesuffix("/*.py")).rglob("*.py")
        for path in sorted(set(paths) - {sweep.TABLE}):
            total.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:12]


class Log:
    """results/<device>/run.csv: the last outcome of each unit, and of each case of those that measure."""

    COLUMNS = ("unit", "outcome", "seconds", "note", "fingerprint", "compile_seconds")

    def __init__(self, context: Context) -> None:
        self.kind, self.path = context.kind, context.folder / "run.csv"

    def rows(self) -> dict[str, dict[str, str]]:
        """By unit."""
        return {row["unit"]: row for row in read_rows(self.path)}

    def done(self, name: str, also: tuple[str, ...] = ()) -> bool:
        """Whether a unit or a case of one was done, or cannot be, with the sources as they are."""
        row = self.rows().get(name, {})
        return row.get("fingerprint") == fingerprint(name) and row.get("outcome") in ("ok", "skipped", *also)

    def lost(self, name: str) -> dict[str, str]:
        """The providers that made the device unusable in a case, and how."""
        start = f"{name}, "
        return {
            unit.removeprefix(start): row["note"]
            for unit, row in self.rows().items()
            if unit.startswith(start) and row["outcome"] == "lost" and row["fingerprint"] == fingerprint(unit)
        }

    def put(self, name: str, outcome: str, seconds: float, note: str = "") -> None:
        """Notes an outcome in the place of an earlier one; of its seconds, those that compilers were waited for."""
        values = (name, outcome, f"{seconds:.0f}", note, fingerprint(name), f"{ahead.spent():.0f}")
        row = dict(zip(self.COLUMNS, values, strict=True))
        write_rows(self.path, list((self.rows() | {name: row | conditions(self.kind)}).values()))


def run_unit(unit: Unit, context: Context) -> int:
    """In this process: 0 ok, 1 failed, 4 skipped, 5 to be resumed in a new process."""
    log, start = Log(context), time.perf_counter()
    try:
        unit.run(context)
    except SkippedError as error:
        log.put(unit.name, "skipped", time.perf_counter() - start, str(error))
        return SKIPPED
    except runner.DeviceLostError as error:
        log.put(unit.name, "failed", time.perf_counter() - start, str(error)[:200])
        print(f"the device is lost: {error}", file=sys.stderr)
        return RESUME
    except Exception as error:
        log.put(unit.name, "failed", time.perf_counter() - start, f"{type(error).__name__}: {str(error)[:200]}")
        raise
    log.put(unit.name, "ok", time.perf_counter() - start)
    return 0


def run_slice(
    chosen: list[Unit],
    context: Context,
    seconds: float = SLICE_SECONDS,
    again: bool = False,
    packed: Path | None = None,
) -> list[str]:
    """Runs what is not done, each unit in a process of its own, while there is time; the names of what is left.

    Args:
        chosen: In this order.
        context: Where and how.
        seconds: All may take.
        again: Also what is done.
        packed: After each unit, all results of the device go into this file.
    """
    log, end, left = Log(context), time.perf_counter() + seconds, []
    for unit in chosen:
        if log.done(unit.name) and not again:
            print(f"done before: {unit.name}")
            continue
        remaining = end - time.perf_counter()
        if remaining < min(unit.seconds, seconds / 2):  # too little for most of a unit
            left.append(unit.name)
            continue
        print(f"== {unit.name} ({remaining:.0f} s left)", flush=True)
        start = time.perf_counter()
        code = _run_process(unit, context, min(remaining, MOST_SECONDS))
        while code == RESUME and end - time.perf_counter() > 10:
            code = _run_process(unit, dataclasses.replace(context, resumed=True), end - time.perf_counter())
        if code not in (0, SKIPPED):
            print(f"== {unit.name}: failed with exit code {code}; going on", flush=True)
            left.append(unit.name)
            if code == TIMEOUT:
                log.put(unit.name, "timeout", time.perf_counter() - start)
            elif log.rows().get(unit.name, {}).get("fingerprint") != fingerprint(unit.name):
                log.put(unit.name, "failed", time.perf_counter() - start, f"exit code {code}")
        if packed is not None:
            pack(context.folder, packed)
    return left


def _run_process(unit: Unit, context: Context, seconds: float) -> int:
    """The exit code of a unit in a process of its own, TIMEOUT where it was ended."""
    command = [sys.executable, "-m", "benchmarks", "gpu", "--unit", unit.name]
    command += ["--results", str(context.results), *(["--dry-run"] if context.dry else [])]
    command += ["--peers", str(context.peers)] if context.peers else []
    command += ["--without", context.without, *(["--resumed"] if context.resumed else [])]
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if context.dry and unit.kernels else None
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, env=environment) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return TIMEOUT


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
    parser.add_argument("--without", default="", help="leave out rivals whose name contains this")
    parser.add_argument("--pack", type=Path, help="default: bench_output/gpu.tar.gz, or gpu-slice-<n>.tar.gz")
    parser.add_argument("--unpack", type=Path, help="put packed results under --results")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    parser.add_argument("--resumed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.dry_run:
        torch.set_num_threads(1)
    if given.unpack:
        names = unpack(given.unpack, given.results or ROOT / "benchmarks" / "results")
        print(f"{len(names)} files: {', '.join(names)}")
        return 0
    everything = units()
    parts = slices(everything)
    if given.slice is not None and not 1 <= given.slice <= len(parts):
        parser.error(f"--slice: got {given.slice}, needs 1 to {len(parts)}")
    results = given.results or (Path(tempfile.mkdtemp()) if given.dry_run else ROOT / "benchmarks" / "results")
    peers = given.peers if given.peers.is_dir() else None
    context = Context(results, given.dry_run, peers, given.without, given.resumed)
    if not given.dry_run and not given.list and not torch.cuda.is_available():
        print("make gpu needs a GPU that PyTorch can use; --dry-run tries the harness without one", file=sys.stderr)
        return 2
    if given.unit:
        torch.manual_seed(0)
        return run_unit(next(unit for unit in everything if unit.name == given.unit), context)
    if given.list:
        rows = Log(context).rows() if given.dry_run or torch.cuda.is_available() else {}
        for stage, what in STAGES.items():
            minutes = sum(unit.seconds for unit in everything if unit.stage == stage) / 60
            print(f"{minutes:4.1f} min {stage}: {what}")
        for number, part in enumerate(parts, 1):
            print(f"slice {number}, about {sum(unit.seconds for unit in part)} s")
            for unit in part:
                print(f"    {unit.name}: {rows.get(unit.name, {}).get('outcome', 'not yet')}")
        _print_bars(context, bool(rows))
        return 0
    name = "gpu.tar.gz" if given.slice is None else f"gpu-slice-{given.slice}.tar.gz"
    packed = given.pack or (context.results if given.dry_run else ROOT / "bench_output") / name
    left = []
    for number, part in enumerate(parts, 1):
        if given.slice in (None, number):
            chosen = [unit for unit in part if given.only in unit.name]
            left += run_slice(chosen, context, again=given.again, packed=packed)
    _print_bars(context, not context.dry)
    print(f"results in {context.folder}, packed in {packed}")
    print("python -m benchmarks sweep --write takes over what the sweep chose")
    if left:
        print(f"left: {', '.join(left)}; run the same again", file=sys.stderr)
    return 3 if left else 0


def pack(folder: Path, target: Path) -> None:
    """Writes every file of a device's results into one, to be carried off a machine that is about to go away."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with tarfile.open(part, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, f"{folder.name}/{path.relative_to(folder).as_posix()}")
    part.replace(target)


def unpack(source: Path, results: Path) -> list[str]:
    """Puts packed results back under `results`; the names of the files."""
    with tarfile.open(source) as archive:
        archive.extractall(results, filter="data")
        return archive.getnames()


def _print_bars(context: Context, wanted: bool) -> None:
    """What has to be reached and what was."""
    for line in check_bars(context.folder) if wanted else ():
        print(line)
