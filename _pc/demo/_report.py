"""What the demo shows: a table per workload, a CSV file and a plot drawn from the same rows."""

from __future__ import annotations

import csv
import platform
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ._run import Measurement

TITLES = {
    "document": "Eight questions about one document",
    "conversation": "A conversation of six rounds",
}


COLUMNS = (
    *("workload", "request", "prompt_tokens", "reused_tokens", "ttft_plain_s", "ttft_cached_s", "ratio", "same"),
    *("model", "dtype", "device", "torch", "threads"),
)


def later_ratio(measurements: list[Measurement], workload: str) -> float:
    """Median of time to first token without over with the cache, from the second request on."""
    return statistics.median(m.ratio for m in measurements if m.workload == workload and m.number > 1)


def print_tables(console: Console, measurements: list[Measurement]) -> None:
    """A table per workload and its headline."""
    for workload, title in TITLES.items():
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
        ratio = later_ratio(measurements, workload)
        console.print(f"From the second request on the first token comes {ratio:.1f} times sooner (median).\n")


def save_csv(path: Path, measurements: list[Measurement], name: str, dtype: torch.dtype, device: torch.device) -> None:
    """One row per request, with its conditions."""
    processor = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for m in measurements:
            times = (f"{m.plain_seconds:.6f}", f"{m.cached_seconds:.6f}", f"{m.ratio:.3f}")
            conditions = (str(dtype).removeprefix("torch."), processor, torch.__version__, torch.get_num_threads())
            writer.writerow(
                (m.workload, m.number, m.prompt_tokens, m.reused_tokens, *times, m.verdict, name, *conditions)
            )


def save_plot(path: Path, measurements: list[Measurement], conditions: str) -> None:
    """Bars of time to first token, without and with the cache, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths = [sum(m.workload == workload for m in measurements) for workload in TITLES]
    figure, axes = pyplot.subplots(
        1, len(TITLES), figsize=(10, 4), sharey=True, layout="constrained", gridspec_kw={"width_ratios": widths}
    )
    for axis, (workload, title) in zip(axes, TITLES.items(), strict=True):
        rows = [m for m in measurements if m.workload == workload]
        places = [m.number for m in rows]
        axis.bar(
            [x - 0.2 for x in places], [m.plain_seconds for m in rows], 0.4, label="without the cache", color="#9aa5b1"
        )
        bars = axis.bar(
            [x + 0.2 for x in places], [m.cached_seconds for m in rows], 0.4, label="with pc", color="#1f77b4"
        )
        axis.bar_label(
            bars, [f"{m.ratio:.0f}x" if m.ratio >= 10 else f"{m.ratio:.1f}x" for m in rows], fontsize=8, padding=2
        )
        axis.set(title=title, xlabel="request", yscale="log", xticks=places)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(axis="y", which="major", alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time to first token (s)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False)
    figure.suptitle(f"Time to first token, {conditions.replace('torch.', '')}", x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
