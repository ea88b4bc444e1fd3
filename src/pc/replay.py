"""`python -m pc replay`, which compares eviction policies on a request trace in a table, a CSV file and a plot."""

from __future__ import annotations

import csv
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ._console import new_progress, new_table
from .cache.policies import POLICIES
from .cache.replay import ORACLES, Result, Trace, compare, hints_of, load_trace

if TYPE_CHECKING:
    from rich.console import Console


def run_replay(
    trace: Path,
    policies: str,
    capacity: str,
    part: str,
    csv_file: Path | None,
    plot: Path | None,
    hints: str,
    block_size: int | None,
) -> None:
    """Replay a trace and print a table; see the command's options.

    Raises:
        BadParameter: The trace cannot be read, or an option has an invalid value.
    """
    from rich.console import Console

    console = Console()
    names = _names(policies, drawn=plot is not None)
    try:
        loaded = load_trace(trace, block_size)
    except (OSError, ValueError, KeyError) as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
    shares = _shares(capacity, loaded)
    whole = loaded.unique_blocks
    chosen_hints = _hints(hints, loaded)
    for option, path in (("--csv", csv_file), ("--plot", plot)):
        if path is not None:
            _check_writable(option, path)
    loaded = _part(part, loaded)
    console.print(
        f"{loaded.name}: {len(loaded.requests)} requests, {loaded.num_blocks} blocks of {loaded.block_size} tokens, "
        f"{loaded.unique_blocks} of them unique.\nRequests run one after another, and their blocks are pinned until "
        "they end. The cache starts empty, and cold misses count."
    )
    with new_progress(console) as bar:
        task = bar.add_task("requests", total=None)
        results = compare(loaded, names, shares, lambda done: bar.advance(task, done), whole, chosen_hints)
    _print(console, results, loaded)
    if csv_file is not None:
        write_csv(csv_file, results)
    if plot is not None:
        draw(plot, results)


def _check_writable(option: str, path: Path) -> None:
    """Make the folder of a file, and check that the file can be written, so that no long replay is lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{path.parent}: {error.strerror}", param_hint=option) from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path}: got a folder, or no right to write, needs a file", param_hint=option)
    if option == "--plot":
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        known = FigureCanvasAgg.get_supported_filetypes()
        if path.suffix and path.suffix[1:] not in known:
            raise typer.BadParameter(f"got {path.name}, needs a suffix of {', '.join(known)}", param_hint=option)


def _names(policies: str, drawn: bool) -> list[str]:
    """Return the names in `--policies`, after a check. A plot (`drawn`) also needs lru and belady."""
    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES and name not in ORACLES:
            known = ", ".join(sorted([*POLICIES, *ORACLES]))
            raise typer.BadParameter(f"got {name!r}, needs one of {known}", param_hint="--policies")
    if not names:
        raise typer.BadParameter("got none, needs at least one", param_hint="--policies")
    return [*names, *(n for n in ("lru", "belady") if drawn and n not in names)]


def _hints(text: str, trace: Trace) -> list[str]:
    """Return the hints in `--hints`, after a check."""
    hints = [name.strip() for name in text.split(",") if name.strip()]
    for hint in hints:
        if hint != "none":
            try:
                hints_of(trace.part(0, 0), hint)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="--hints") from None
    return hints or ["none"]


def _shares(capacity: str, trace: Trace) -> list[float]:
    """Return the capacities in `--capacity` as shares of the trace's unique blocks."""
    shares = []
    for text in capacity.split(","):
        try:
            value = text.strip()
            share = float(value[:-1]) / 100 if value.endswith("%") else int(value) / max(trace.unique_blocks, 1)
        except (ValueError, OverflowError):
            share = 0.0
        if not 0 < share * max(trace.unique_blocks, 1) < 1 << 30:  # nan is refused too
            raise typer.BadParameter(
                f"got {text!r}, needs a share such as 3% or a number of blocks, below 2**30 blocks",
                param_hint="--capacity",
            )
        shares.append(share)
    return shares


def _part(text: str, trace: Trace) -> Trace:
    """Return the part of a trace that `--part` names, such as 50%-100%."""
    try:
        start, end = (float(edge.strip().removesuffix("%")) / 100 for edge in text.split("-"))
    except ValueError:
        start = end = 0.0
    if not 0 <= start < end <= 1:
        raise typer.BadParameter(f"got {text!r}, needs two shares such as 50%-100%", param_hint="--part")
    return trace if (start, end) == (0, 1) else trace.part(start, end)


def _print(console: Console, results: list[Result], trace: Trace) -> None:
    texts, numbers = ("capacity", "blocks", "policy", "hints"), ("prefix hits", "with gaps", "x lru", "tokens saved")
    table = new_table(f"{trace.name}: share of all blocks that was hit", texts, (*numbers, "seconds"))
    tokens = trace.num_blocks * trace.block_size
    for r in results:
        capacity = f"{r.capacity_share:.2%}", str(r.capacity_blocks)
        rates = f"{r.hit_rate:.4f}", f"{r.gap_hit_rate:.4f}", f"{r.lru_ratio:.3f}"
        saved = f"{r.hit_rate * tokens / 1e6:.1f} M"
        table.add_row(*capacity, r.policy, r.hints, *rates, saved, f"{r.seconds:.1f}")
    console.print(table)


def write_csv(path: Path, results: list[Result]) -> None:
    """Write a row for each result, with the fields of `Result` as columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Result)])
        writer.writeheader()
        for result in results:
            writer.writerow({k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(result).items()})


def draw(path: Path, results: list[Result]) -> None:
    """Draw hit rate against capacity, with a line for each policy and hint. Belady's line, the optimum, is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, hints in dict.fromkeys((r.policy, r.hints) for r in results):
        rows = sorted((r for r in results if (r.policy, r.hints) == (name, hints)), key=lambda r: r.capacity_share)
        style = {"linestyle": "--", "color": "0.5"} if name == "belady" else {"marker": "o"}
        label = name if hints == "none" else f"{name}, hints {hints}"
        axes.plot([100 * r.capacity_share for r in rows], [r.hit_rate for r in rows], label=label, **style)
    axes.set(
        title=results[0].trace, xlabel="capacity, share of the trace's unique blocks", ylabel="share of blocks hit"
    )
    axes.set_xscale("log")
    ticks = sorted({100 * r.capacity_share for r in results})
    axes.set_xticks(ticks, [f"{t:g} %" for t in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
