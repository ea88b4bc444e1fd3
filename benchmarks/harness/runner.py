"""Run benchmarks: check every provider's result first, then time in turns those that are right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from . import timing
from .ceilings import Ceilings, measure_ceilings
from .conditions import conditions, device_folder
from .inputs import Inputs, WrongError
from .registry import OURS, Benchmark, Case, Provider, UnsupportedError
from .tables import Row, replaced, write_rows

MEASURED = ("p20_us", "p50_us", "p80_us", "samples", "error", "bytes", "flops", "copy_gbs", "matmul_tflops", "roofline")
KEY = ("case", "provider", "mode")
LOST = "loses the device: "  # begins the note of a provider that made the device unusable
# Inputs rotate over four times the last-level cache, so that each call finds its own cold.
ROTATE = {"cpu": 128 << 20, "cuda": 256 << 20}


class WrongResultError(Exception):
    """A wrong result of our own operator; nothing was timed."""


class DeviceLostError(Exception):
    """A device that a provider left unusable; only a new process can continue, without that provider."""

    def __init__(self, provider: str, error: Exception) -> None:
        super().__init__(f"{provider}: {_first_line(error)}")
        self.provider = provider


def run_case(
    benchmark: Benchmark,
    case: Case,
    seconds: float,
    only: str | None = None,
    tiny: bool = False,
    note: Callable[[str], None] = lambda text: None,
    without: str = "",
    lost: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """Measure one case.

    Args:
        benchmark: The benchmark whose providers take part.
        case: The inputs.
        seconds: Approximate time for each mode.
        only: Part of the names of rivals that take part; None: all.
        tiny: Use almost no rotation and time, to test the harness.
        note: Called with the name of the provider that is prepared.
        without: Part of the names of rivals to leave out; empty: none.
        lost: Errors of providers that made the device unusable before; their rows have them as notes.

    Returns:
        A row per provider and mode; a provider that cannot do the case has one row with a note and no times.

    Raises:
        WrongResultError: Our own result is wrong.
        DeviceLostError: A provider made the device unusable.
    """
    device = torch.device(case.device)
    ceilings = measure_ceilings(case.device, tiny)
    inputs = case.build(device, 0 if tiny else ROTATE[case.device])
    ready: dict[str, list[Callable[[], Any]]] = {}
    facts: dict[str, Row] = {}
    notes: dict[str, str] = {}
    for provider in benchmark.providers:
        name = provider.name
        if not takes_part(provider, case.device, only, without):
            continue
        facts[name] = {"case": case.name, "provider": name}
        if name in lost:
            notes[name] = f"{LOST}{lost[name]}"
            continue
        try:
            facts[name]["version"] = provider.version()
            note(name)
            ready[name], largest = _prepare(provider, inputs, device, seconds)
            facts[name]["error"] = f"{largest:.3g}"
        except Exception as error:
            if isinstance(error, ImportError) and "version" not in facts[name]:
                continue  # it is not installed
            still_there(device, name, error)
            if name == OURS and isinstance(error, WrongError):
                raise WrongResultError(f"{benchmark.op}, {case.name}: {error}") from error
            if name == OURS and not isinstance(error, UnsupportedError):
                raise
            notes[name] = _why_untimed(error)
    note("timing")
    modes = {"eager": timing.time_eager(ready, device, seconds)}
    if case.device == "cuda":
        graphs = {}
        for name, runs in ready.items():
            try:
                graphs[name] = (timing.capture(runs), len(runs))
            except Exception as error:  # noqa: PERF203
                still_there(device, name, error)
                facts[name]["note"] = f"no CUDA graph: {_first_line(error)}"
        if graphs:
            modes["graph"] = timing.time_graphs(graphs, seconds)
    rows = [facts[name] | {"mode": "", "note": text} for name, text in notes.items()]
    for mode, times in modes.items():
        rows += [facts[name] | {"mode": mode} | _numbers(inputs, taken, ceilings) for name, taken in times.items()]
    shared = case.conditions | conditions(case.device)
    return [row | shared for row in rows]


def _why_untimed(error: Exception) -> str:
    """Return the note of a provider that cannot do a case, or does it wrong."""
    if isinstance(error, WrongError):
        return f"wrong: {error}"
    return f"n/a: {error}" if isinstance(error, UnsupportedError) else f"fails: {_first_line(error)}"


def takes_part(provider: Provider, kind: str, only: str | None = None, without: str = "") -> bool:
    """Return whether a provider is measured on this kind of device. `only` and `without` are as in `run_case`."""
    if provider.device not in (None, kind):
        return False
    return provider.name == OURS or ((only or "") in provider.name and not (without and without in provider.name))


def _prepare(
    provider: Provider, inputs: Inputs, device: torch.device, seconds: float
) -> tuple[list[Callable[[], Any]], float]:
    runs = [provider.prepare(call) for call in inputs.calls]
    error = inputs.check(inputs.calls[-1], runs[-1])
    if device.type == "cuda":
        # All runs of a provider are timed at once: of one that takes long, two have to do.
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        runs[-1]()
        torch.cuda.synchronize(device)
        took = max(time.perf_counter() - start, 1e-6)
        runs = runs[-max(2, int(seconds / 20 / took)) :]
    return runs, error


def still_there(device: torch.device, provider: str, error: Exception) -> None:
    """Free the memory that a failure left allocated; raise DeviceLostError if the device does not answer."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception as lost:
        raise DeviceLostError(provider, error) from lost


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def _numbers(inputs: Inputs, seconds: Sequence[float], ceilings: Ceilings) -> Row:
    """Return a row's times of a call, and its share of the highest speed."""
    times = dict(zip(("p20_us", "p50_us", "p80_us"), np.quantile(seconds, (0.2, 0.5, 0.8)) * 1e6, strict=True))
    ideal = ceilings.seconds(inputs.bytes, inputs.flops)
    return {name: f"{time:.2f}" for name, time in times.items()} | {
        "samples": str(len(seconds)),
        "bytes": str(inputs.bytes),
        "flops": str(inputs.flops),
        "copy_gbs": f"{ceilings.copy / 1e9:.1f}",
        "matmul_tflops": f"{ceilings.matmul / 1e12:.3f}",
        "roofline": f"{ideal * 1e6 / times['p50_us']:.3g}",
    }


def results_path(folder: Path, kind: str, op: str) -> Path:
    """Return the path of an operator's rows."""
    return folder / device_folder(kind) / f"{op}.csv"


def save_rows(path: Path, benchmark: Benchmark, rows: Iterable[Row]) -> None:
    """Replace rows of the same cases by new ones, and drop rows of other machines and of removed cases."""
    rows = list(rows)
    if not rows:
        return
    order = {name: place for place, name in enumerate(dict.fromkeys(case.name for case in benchmark.cases))}
    found = [row for row in replaced(path, rows, ("case",)) if row["case"] in order]
    found = [row for row in found if row["device"] == rows[0]["device"]]
    found.sort(key=lambda row: order[str(row["case"])])
    write_rows(path, found, [*KEY, "version", *MEASURED, "note"])


def run_benchmarks(
    benchmarks: list[Benchmark],
    kind: str,
    quick: bool,
    pattern: str = "",
    only: str | None = None,
    tiny: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Benchmark, list[Row]]]:
    """Measure one case after another, and yield the rows of each.

    Args:
        benchmarks: Benchmarks of operators.
        kind: "cpu" or "cuda".
        quick: Run only quick cases, for a third of the time.
        pattern: Part of the names of cases.
        only: Part of the names of rivals that take part; None: all.
        tiny: See `run_case`.
        note: Called with the current work.
    """
    seconds = 0.02 if tiny else 1.0 if quick else 3.0
    for benchmark in benchmarks:
        for case in benchmark.of(kind, quick, pattern):
            title = f"{benchmark.op}: {case.name}"
            note(title)
            yield (
                benchmark,
                run_case(benchmark, case, seconds, only, tiny, lambda name, title=title: note(f"{title}, {name}")),
            )
