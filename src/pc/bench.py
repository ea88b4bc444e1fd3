"""`python -m pc bench`, which times operators. It needs a checkout, because the wheel does not hold the benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ._console import choose_device, new_progress, new_table

PACKAGE = "benchmarks"


def find_checkout() -> Path:
    """Return the root of the first checkout of the repository that is found.

    Look for the checkout that contains this package, the current folder, or the running script, in this order.

    Raises:
        FileNotFoundError: None of them is in a checkout.
    """
    for root in (Path(__file__).resolve().parents[2], Path.cwd(), Path(sys.argv[0]).resolve().parent.parent):
        if (root / "benchmarks" / "harness" / "registry.py").exists():
            return root
    raise FileNotFoundError(
        "python -m pc bench needs a checkout of the repository: the benchmarks are not in the wheel; run it there"
    )


def load_benchmarks() -> ModuleType:
    """Import the checkout's benchmarks/ as the package `benchmarks`, even if a package of that name is installed.

    Raises:
        FileNotFoundError: There is no checkout.
    """
    folder = find_checkout() / "benchmarks"
    if getattr(sys.modules.get(PACKAGE), "__path__", None) == [str(folder)]:
        return sys.modules[PACKAGE]
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    return module


def run_bench(
    ops: list[str],
    device: str | None,
    quick: bool,
    case: str,
    provider: str | None,
    output: Path,
    threads: int,
    peers: Path | None,
) -> int:
    """Time operators, print a table for each, write CSV files and return the exit status; see the command's options."""
    import torch
    from rich.console import Console

    console = Console()
    try:
        kind = choose_device(device).type
        if device not in (None, kind):
            raise ValueError(f"device: got {device!r}, needs cpu or cuda")
    except ValueError as error:
        console.print(f"--{error}", style="red")
        return 2
    try:
        load_benchmarks()
        registry, runner, plug = (
            importlib.import_module(f"{PACKAGE}.harness.{m}") for m in ("registry", "runner", "peers")
        )
        benchmarks = registry.discover(ops or None)
    except (FileNotFoundError, ValueError) as error:
        console.print(str(error), style="red")
        return 2
    if kind == "cpu":
        torch.set_num_threads(threads)
    if peers is not None:
        plug.add_peers(peers)
    missing = _nothing_matches(benchmarks, kind, quick, case, provider)
    if missing:
        console.print(missing, style="red")
        return 2
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(f"--output: {output}: {error.strerror}", style="red", markup=False)
        return 2
    total = sum(len(benchmark.of(kind, quick, case)) for benchmark in benchmarks)
    rows: dict[str, list[Any]] = {}
    with new_progress(console) as progress:
        task = progress.add_task("ceilings", total=total)

        def note(text: str) -> None:
            progress.update(task, description=text)

        try:
            for benchmark, found in runner.run_benchmarks(benchmarks, kind, quick, case, provider, False, note):
                progress.update(task, description="", advance=1)
                runner.save_rows(runner.results_path(output, kind, benchmark.op), benchmark, found)
                rows.setdefault(benchmark.op, []).extend(found)
        except runner.WrongResultError as error:
            console.print(f"[red]wrong result, nothing timed:[/red] {error}")
            return 1
        except runner.DeviceLostError as error:
            console.print(f"[red]the device failed; start a new process to continue:[/red] {error}")
            return 1
    for op, found in rows.items():
        console.print(_table(op, found))
    console.print(f"Rows with all conditions: {runner.results_path(output, kind, '*')}")
    return 0


def _nothing_matches(benchmarks: list[Any], kind: str, quick: bool, case: str, provider: str | None) -> str:
    """Return an error message if no case or no provider matches its filter, else an empty string."""
    cases = [c.name for benchmark in benchmarks for c in benchmark.of(kind, quick)]
    if not any(case in name for name in cases):
        return f"--case: got {case!r}, needs a part of one of: {'; '.join(dict.fromkeys(cases))}"
    providers = [p.name for benchmark in benchmarks for p in benchmark.providers if p.device in (None, kind)]
    if provider and not any(provider in name for name in providers):
        return f"--provider: got {provider!r}, needs a part of one of: {'; '.join(dict.fromkeys(providers))}"
    return ""


def _table(op: str, rows: list[dict[str, str]]) -> Any:
    """Return a table of an operator's times, fastest first within a case and mode."""
    table = new_table(op, ("case", "provider", "mode"), ("p50 us", "p20..p80", "roofline"))
    before = None
    for row in sorted(rows, key=lambda r: (r["case"], r["mode"], float(r.get("p50_us") or "inf"))):
        case, before = (row["case"] if row["case"] != before else ""), row["case"]
        if row.get("p50_us"):
            spread = f"{row['p20_us']}..{row['p80_us']}"
            cells = (f"{float(row['p50_us']):,.1f}", spread, f"{float(row['roofline']):.0%}")
        else:
            cells = ("", "", row.get("note", ""))
        style = "bold" if row["provider"] == "pc" else None
        table.add_row(case, row["provider"], row["mode"], *cells, style=style)
    return table
