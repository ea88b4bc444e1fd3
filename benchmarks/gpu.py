"""Check and measure the kernels on a GPU: `make gpu`.

The jobs are in the order of their worth. A call runs those that are not done, for nine minutes; call it again for the
rest. Each job is a process, so a crash stops no other job. `run.csv` among the device's results has the outcome of each
job. A job runs again once the sources have changed or its rows are deleted.

Examples:
    python -m benchmarks gpu --list         (the jobs and their outcomes)
    python -m benchmarks gpu
    python -m benchmarks gpu --dry-run      (the same on the CPU, small)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .harness import runner
from .harness.conditions import conditions, device_folder, has_changed
from .harness.peers import add_peers
from .harness.registry import OURS, ROOT, Benchmark, discover
from .harness.runner import LOST
from .harness.tables import Row, read_rows, replaced, write_rows
from .kernels import sweep

SECONDS = 530
MOST_SECONDS = 400  # of one job, so that a job that hangs leaves time for later jobs
TIMEOUT, DEVICE_LOST = 124, 5
STEPS = {
    "check": "every kernel gives what PyTorch gives: `pc check`",
    "decisive": "decodes, prefills, chunks, windows and holes beside the rivals",
    "tests": "the tests of operators, graphs and adapters",
    "generate": "generation with a model of a billion parameters",
    "sweep": "decode and prefill at head_dim 128 with other constants",
    "rest": "all other cases and sweeps, and the pages",
}
DECISIVE = {"paged_attention": 24, "sparse_gap_attention": 8, "sliding_window_attention": 8}
"""The number of an operator's cases that are measured early, from its first case on."""
SWEPT = 2
"""The number of a sweep's cases that come before the rest: those of head_dim 128."""
FAILS = "fails: "


class Job(NamedTuple):
    """A command for Python."""

    step: str  # one of `STEPS`
    name: str  # in `run.csv`
    arguments: tuple[str, ...]
    shares: int = 1  # processes side by side, each with its share of the tests
    environment: dict[str, str] = {}  # noqa: RUF012  never changed


class Options(NamedTuple):
    """The options that a run hands to its jobs."""

    results: Path
    dry: bool
    peers: Path | None = None
    without: str = ""

    @property
    def kind(self) -> str:
        """Return the kind of device."""
        return "cpu" if self.dry else "cuda"

    @property
    def folder(self) -> Path:
        """Return the folder of this device's results."""
        return self.results / device_folder(self.kind)

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return the arguments of a process that does a part of the work in this module."""
        given = ["-m", "benchmarks", "gpu", "--results", str(self.results), "--without", self.without]
        given += [*(["--dry-run"] if self.dry else []), *(["--peers", str(self.peers)] if self.peers else [])]
        return (*given, "--part", *arguments)


def workers() -> int:  # processes that compile or test side by side
    return max(1, min(12, (os.cpu_count() or 1) - 2))


def jobs(options: Options) -> list[Job]:
    """Return all jobs in the order of their worth: each is useful if the next never runs."""
    interpreted = {"TRITON_INTERPRET": "1"} if options.dry else {}
    shares, collect = (1, ("--collect-only",)) if options.dry else (workers(), ())

    def test(name: str, *arguments: str) -> Job:
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *collect, *arguments)
        return Job("tests", f"tests {name}", command, shares, {"PC_BARE": "1"})

    def bench(step: str, op: str, first: int) -> Job:
        environment = interpreted if op.startswith("sweep") else {}
        return Job(step, f"{step} {op}", options.command("bench", op, str(first)), 1, environment)

    output = str(options.folder / "generate.csv")
    generate = ("-m", "benchmarks", "generate", "--device", options.kind, "--output", output)
    check = ("-m", "pc", "check", *(["--quick"] if options.dry else []))
    return [
        Job("check", "check", check, 1, interpreted),
        *(bench("decisive", op, count) for op, count in DECISIVE.items()),
        test("operators", "tests/triton_ops", "--ignore", "tests/triton_ops/test_kernel_resources.py"),
        test("graphs and adapters", "tests/triton_ops", "tests/cache", "tests/integrations", "-m", "gpu"),
        Job("generate", "generate", generate),
        *(bench("sweep", benchmark.op, SWEPT) for benchmark in sweep.BENCHMARKS),
        *(bench("rest", op, 0) for op in benchmarks()),
        Job("rest", "pages", ("-m", "benchmarks", *(["--help"] if options.dry else ["render"]))),
    ]


def outcome_of(name: str, options: Options) -> str:
    """Return the outcome of a job from `run.csv`; empty if there is none, or for other sources."""
    rows = [row for row in read_rows(options.folder / "run.csv") if row["job"] == name and not has_changed(row)]
    return rows[0]["outcome"] if rows else ""


def run(chosen: list[Job], options: Options, seconds: float) -> list[str]:
    """Run the jobs that are not done while there is time, and return the names of those that are left or failed."""
    log, end, left = options.folder / "run.csv", time.monotonic() + seconds, []
    for job in chosen:
        if outcome_of(job.name, options) == "ok":
            print(f"done before: {job.name}")
            continue
        remaining, start = end - time.monotonic(), time.monotonic()
        if remaining < seconds / 20:
            left.append(job.name)
            continue
        print(f"== {job.name} ({remaining:.0f} s left)", flush=True)
        code = run_job(job, min(remaining, MOST_SECONDS))
        while code == DEVICE_LOST and end - time.monotonic() > seconds / 20:
            code = run_job(job, end - time.monotonic())
        outcome = {0: "ok", TIMEOUT: "timeout"}.get(code, f"exit code {code}")
        row = {"job": job.name, "outcome": outcome, "seconds": f"{time.monotonic() - start:.0f}"}
        write_rows(log, replaced(log, [row | conditions(options.kind)], ("job",)))
        if code:
            print(f"== {job.name}: {outcome}; going on", flush=True)
            left.append(job.name)
    return left


def run_job(job: Job, seconds: float) -> int:
    """Run a job in processes of its own, and return their first exit code that is not 0."""
    started, end = [], time.monotonic() + seconds
    for share in range(job.shares):
        environment = {**os.environ, **job.environment, "PC_SHARE": f"{share}/{job.shares}"}
        if job.shares > 1:  # by default, each process would compute expected results with a thread for each core
            environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, *job.arguments]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True))
    codes = [_wait(process, end) for process in started]
    return next((code for code in codes if code not in (0, 5 if "pytest" in job.arguments else 0)), 0)  # 5: no test


def _wait(process: subprocess.Popen[bytes], end: float) -> int:
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return TIMEOUT


def benchmarks() -> dict[str, Benchmark]:
    """Return the benchmarks of operators and the sweeps, by name."""
    return {benchmark.op: benchmark for benchmark in (*discover(), *sweep.BENCHMARKS)}


def bench(op: str, first: str | int, options: Options) -> int:
    """Measure the first cases of an operator (0: all) that have no rows yet, and save each when it is done."""
    benchmark = benchmarks()[op]
    if options.peers is not None:
        add_peers(options.peers)
    path = runner.results_path(options.results, options.kind, op)
    cases = benchmark.of("cpu", True)[:1] if options.dry else benchmark.of("cuda", False)[: int(first) or None]
    missing = [case for case in cases if OURS not in _rows_of(path, case.name)]
    if not options.dry:
        compile_first([op, *(case.name for case in missing)], options)
    for case in missing:
        lost = {name: row["note"].removeprefix(LOST) for name, row in _rows_of(path, case.name).items()}
        seconds = 0.02 if options.dry else 1.5
        try:
            rows = runner.run_case(benchmark, case, seconds, None, options.dry, without=options.without, lost=lost)
        except Exception as error:
            provider = error.provider if isinstance(error, runner.DeviceLostError) else OURS
            notes = {name: f"{LOST}{how}" for name, how in lost.items()}
            notes[provider] = f"{FAILS if provider == OURS else LOST}{error}"
            shared = {"case": case.name, "mode": ""} | case.conditions | conditions(options.kind)
            runner.save_rows(path, benchmark, [shared | {"provider": n, "note": v[:200]} for n, v in notes.items()])
            if isinstance(error, runner.DeviceLostError):
                return DEVICE_LOST  # the next process goes on, without the rival
            runner.still_there(torch.device(options.kind), "timing", error)
        else:
            runner.save_rows(path, benchmark, rows)
            print(f"{op}: {case.name}", flush=True)
    failed = [case.name for case in cases if _rows_of(path, case.name)[OURS].get("note", "").startswith(FAILS)]
    print(*(f"{op}: {name} failed" for name in failed), sep="\n")
    return 1 if failed else 0


def _rows_of(path: Path, case: str) -> dict[str, Row]:
    """Return a case's rows that hold for the present operators, by provider."""
    rows = [row for row in read_rows(path) if row["case"] == case and not has_changed(row, ("triton_ops",))]
    return {row["provider"]: row for row in rows}


def compile_first(names: list[str], options: Options) -> None:
    """Fill Triton's cache for some cases of an operator, by several processes at once."""
    job = Job("", f"compile {names[0]}", options.command("compile", *names), workers())
    print(f"{job.name} in {job.shares} processes", flush=True)
    run_job(job, MOST_SECONDS)


def compile_share(*given: Any) -> int:
    """Run one process's share of the first calls of cases."""
    *names, options = given
    share, count = map(int, os.environ["PC_SHARE"].split("/"))
    for call in list(_first_calls(names, options))[share::count]:
        with contextlib.suppress(Exception):  # it fails again, and is noted, where it is measured
            call()
    return 0


def _first_calls(names: list[str], options: Options) -> Iterator[Callable[[], object]]:
    device, benchmark = torch.device(options.kind), benchmarks()[names[0]]
    for case in benchmark.of(options.kind, False):
        for provider in benchmark.providers if case.name in names[1:] else ():
            if runner.takes_part(provider, options.kind, without=options.without):
                # Each call gets its inputs when it runs. The inputs of all cases, in each process, would fill a GPU.
                yield lambda case=case, provider=provider: provider.prepare(case.build(device, 0).calls[0])()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 0 when nothing is left, else 3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="", help="jobs whose step or name begins with this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long all may take")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results, or a new folder for a dry run")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers" / "gpu", help="folder of other projects' wheels")
    parser.add_argument("--without", default="", help="leave out rivals whose name contains this")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)  # what a job runs
    given = parser.parse_args(arguments)
    results = given.results or (Path(tempfile.mkdtemp()) if given.dry_run else ROOT / "benchmarks" / "results")
    options = Options(results.absolute(), given.dry_run, given.peers if given.peers.is_dir() else None, given.without)
    if not given.dry_run and not torch.cuda.is_available():
        print("make gpu needs a GPU that PyTorch can use; --dry-run tries it without one", file=sys.stderr)
        return 2
    if given.dry_run:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.part:
        name, *rest = given.part
        return {"compile": compile_share, "bench": bench}[name](*rest, options)
    chosen = [job for job in jobs(options) if job.step == given.only or job.name.startswith(given.only)]
    if given.list:
        for job in chosen:
            print(f"{job.step:10}{job.name}: {outcome_of(job.name, options) or 'not yet'}")
        return 0
    left = run(chosen, options, given.seconds)
    print(f"results in {options.folder}; `python -m benchmarks render` writes the pages")
    if left:
        print(f"left: {', '.join(left)}; run the same again", file=sys.stderr)
    return 3 if left else 0
