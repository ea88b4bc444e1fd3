"""The demo's output: a table for each workload, a CSV file, and a chart of its rows."""

from __future__ import annotations

import csv
import platform
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from ._measure import Measurement

TITLES = {
    "document": "Six questions about one document",
    "gap": "Six questions behind an evicted middle",
    "conversation": "A conversation of six rounds",
    "picture": "Four questions about each of two pictures",
}


COLUMNS = (
    *("workload", "request", "prompt_tokens", "reused_tokens", "reused_spans"),
    *("ttft_plain_s", "ttft_cached_s", "ratio", "same", "question", "answer"),
    *("model", "dtype", "device", "torch", "threads"),
)


def later_ratio(measurements: list[Measurement], workload: str) -> float:
    """Return the median speed-up of the time to first token, from the workload's second request on."""
    return statistics.median(m.ratio for m in measurements if m.workload == workload and m.number > 1)


def print_tables(console: Console, measurements: list[Measurement]) -> None:
    """Print for each workload a table, its questions and answers, and the median speed-up."""
    for workload, title in TITLES.items():
        if all(m.workload != workload for m in measurements):
            continue
        table = Table(title=title, title_justify="left")
        for column in (
            "request",
            "prompt\ntokens",
            "reused\ntokens",
            "1st token\nwithout",
            "1st token\nwith pc",
            "ratio",
        ):
            table.add_column(column, justify="right")
        table.add_column("same\ntokens")
        for m in measurements:
            if m.workload == workload:
                table.add_row(
                    str(m.number),
                    f"{m.prompt_tokens:,}",
                    f"{m.reused_tokens:,}",
                    f"{m.plain_seconds * 1e3:,.0f} ms",
                    f"{m.cached_seconds * 1e3:,.0f} ms",
                    f"{m.ratio:.1f}x",
                    m.verdict if m.ok else f"[red]{m.verdict}[/red]",
                )
        console.print(table)
        for m in measurements:
            if m.workload == workload:
                console.print(f"[dim]{m.number}  {escape(m.question)}[/dim]\n   {escape(m.answer)}", highlight=False)
        ratio = later_ratio(measurements, workload)
        console.print(f"From the second request on, the first token comes {ratio:.1f} times sooner (median).\n")


def save_csv(path: Path, measurements: list[Measurement], name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Write a row for each request, with the model, dtype, device, version of torch and number of threads."""
    processor = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for m in measurements:
            times = (f"{m.plain_seconds:.6f}", f"{m.cached_seconds:.6f}", f"{m.ratio:.3f}")
            conditions = (str(dtype).removeprefix("torch."), processor, torch.__version__, torch.get_num_threads())
            spans = " ".join(f"{start}-{end}" for start, end in m.reused_spans)
            writer.writerow(
                (
                    *(m.workload, m.number, m.prompt_tokens, m.reused_tokens, spans, *times, m.verdict),
                    *(m.question, m.answer, name, *conditions),
                )
            )


def save_plot(path: Path, source: Path) -> None:
    """Draw the chart of a CSV file that `save_csv` wrote; see `_plot`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from ._plot import draw_requests

    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = draw_requests(pyplot, rows, TITLES)
    conditions = f"{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['device']}, torch {rows[0]['torch']}"
    figure.supxlabel(conditions, fontsize=8, color="#6b7280")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
