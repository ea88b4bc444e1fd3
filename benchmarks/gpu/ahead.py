"""Compiles what a unit of `make gpu` will run, by several processes into Triton's cache: one would take minutes.

    python -m benchmarks ahead --share 0/12 bench paged_attention 0
    python -m benchmarks ahead --share 0/12 sweep "decode head_dim 128 block 16"

Each process runs its share of the unit's cases or candidates once. What fails here fails again, and is noted, where it
is measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

from ..harness.registry import ROOT, discover

CASES_PER_UNIT = 8
_spent = [0.0]


def device_kind(dry: bool) -> str:
    """Kind of device of a run."""
    return "cpu" if dry else "cuda"


def workers() -> int:
    """How many processes compile at once."""
    return max(1, min(12, (os.cpu_count() or 1) - 2))


def spent() -> float:
    """Seconds this process has waited for compilers."""
    return _spent[0]


def in_shares(
    commands: list[list[str]], limit: float = 400.0, environments: list[dict[str, str]] | None = None
) -> list[int]:
    """Runs commands side by side in the root of the repository; their exit codes, 124 of one that ran past `limit`."""
    end, running = time.monotonic() + limit, []
    for k, command in enumerate(commands):
        added = environments[k] if environments else {}
        running.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **added}))
    return [_ended(process, end) for process in running]


def _ended(process: subprocess.Popen[bytes], end: float) -> int:
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 124


def compile_ahead(*job: str, dry: bool = False) -> None:
    """Fills Triton's cache for a job: ("bench", operator, part) or ("sweep", key)."""
    start, count = time.perf_counter(), 2 if dry else workers()
    command, flags = [sys.executable, "-m", "benchmarks", "ahead"], ["--dry-run"] if dry else []
    in_shares([[*command, "--share", f"{k}/{count}", *flags, *job] for k in range(count)])
    _spent[0] += time.perf_counter() - start


def _bench(op: str, part: str, dry: bool) -> Iterator[Callable[[], object]]:
    (benchmark,), kind = discover([op]), device_kind(dry)
    first = int(part) * CASES_PER_UNIT
    cases = benchmark.of("cpu", True)[:1] if dry else benchmark.of(kind, False)[first : first + CASES_PER_UNIT]
    for case in cases:

        def run(case=case) -> None:  # type: ignore[no-untyped-def]
            inputs = case.build(torch.device(kind), 0)
            for provider in benchmark.providers:
                if provider.device in (None, kind):
                    _quietly(lambda provider=provider: provider.prepare(inputs.calls[0])())

        yield run


def _sweep(key: str, _: str, dry: bool) -> Iterator[Callable[[], object]]:
    from . import sweep

    regime = next(regime for regime in sweep.regimes(dry) if regime.key == key)
    yield from sweep.first_calls(regime, torch.device(device_kind(dry)), 2 if dry else None)


def _quietly(run: Callable[[], object]) -> None:
    try:
        run()
    except Exception as error:
        print(f"ahead: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """One process's share of a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", required=True, help="k/n")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("job", nargs="+")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    share, count = map(int, given.share.split("/"))
    kind, name, part = (*given.job, "")[:3]
    jobs = {"bench": _bench, "sweep": _sweep}[kind](name, part, given.dry_run)
    for number, run in enumerate(jobs):
        if number % count == share:
            _quietly(run)
    return 0
