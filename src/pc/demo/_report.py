"""The demo's output: a table for each workload, a CSV file, and a chart of its rows."""

from __future__ import annotations

import csv
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape

from .._console import new_table
from ._plot import Rows, draw_requests

if TYPE_CHECKING:
    from ._measure import Measurement

TITLES = {
    "document": "Six questions about one document",
    "gap": "Six questions after an evicted middle",
    "conversation": "A conversation of six rounds",
    "picture": "Four questions about each of two pictures",
}
NUMBERS = ("request", "prompt\ntokens", "reused\ntokens", "1st token\nwithout", "1st token\nwith pc", "ratio")


def print_tables(console: Console, measurements: Sequence[Measurement]) -> None:
    """Print for each workload a table, its questions and answers, and the median speed-up."""
    for workload, title in TITLES.items():
        chosen = [m for m in measurements if m.workload == workload]
        if not chosen:
            continue
        table = new_table(title, (), NUMBERS)
        table.add_column("same\ntokens")
        for m in chosen:
            times = [f"{seconds * 1e3:,.0f} ms" for seconds in (m.plain_seconds, m.cached_seconds)]
            verdict = m.verdict if m.ok else f"[red]{m.verdict}[/red]"
            table.add_row(
                str(m.number), f"{m.prompt_tokens:,}", f"{m.reused_tokens:,}", *times, f"{m.ratio:.1f}x", verdict
            )
        console.print(table)
        for m in chosen:
            console.print(f"[dim]{m.number}  {escape(m.question)}[/dim]\n   {escape(m.answer)}", highlight=False)
        ratio = statistics.median(m.ratio for m in chosen if m.number > 1)
        console.print(f"From the second request on, the first token comes {ratio:.1f} times sooner (median).\n")


def rows_of(measurements: Sequence[Measurement], name: str, dtype: torch.dtype, device: torch.device) -> Rows:
    """Return a row for each request, with the model, dtype, device, version of torch and number of threads."""
    on_gpu = device.type == "cuda"
    conditions = {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }
    return [
        {
            "workload": m.workload,
            "request": str(m.number),
            "prompt_tokens": str(m.prompt_tokens),
            "reused_tokens": str(m.reused_tokens),
            "reused_spans": " ".join(f"{start}-{end}" for start, end in m.reused_spans),
            "ttft_plain_s": f"{m.plain_seconds:.6f}",
            "ttft_cached_s": f"{m.cached_seconds:.6f}",
            "ratio": f"{m.ratio:.3f}",
            "same": m.verdict,
            "question": m.question,
            "answer": m.answer,
            **conditions,
        }
        for m in measurements
    ]


def save_csv(path: Path, rows: Rows) -> None:
    """Write rows to a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def save_plot(path: Path, rows: Rows) -> None:
    """Draw the chart of rows; see `_plot`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = draw_requests(pyplot, rows, TITLES)
    conditions = f"{rows[0]['model']}, {rows[0]['dtype']}, {rows[0]['device']}, torch {rows[0]['torch']}"
    figure.supxlabel(conditions, fontsize=8, color="#6b7280")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
