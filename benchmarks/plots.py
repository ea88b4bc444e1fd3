"""Charts drawn from rows of a CSV file and nothing else; one SVG serves light and dark pages."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .runner import Row, read_rows

INK, PAPER, GRID = "#1f2937", "#ffffff", "#d5dae1"
DARK = {INK: "#e5e7eb", PAPER: "#1e2129", GRID: "#3d4452"}
OURS_COLOR = "#2f74d0"
RIVALS = ("#9aa5b1", "#e0903b", "#3f9d73", "#a46bbd", "#c2564b", "#7f8c4d", "#5aa3a8", "#b08a5b")


def digest(path: Path) -> str:
    """Of the rows a chart is drawn from; it is written into the chart, so that a stale one shows."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def drawn_from(chart: Path) -> str:
    """The digest in a chart; empty where there is none."""
    found = re.search(r"rows ([0-9a-f]{16})", chart.read_text(encoding="utf-8")) if chart.exists() else None
    return found[1] if found else ""


def _save(path: Path, source: Path, draw: Callable[[Any], Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": path.name,
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": GRID,
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "savefig.facecolor": PAPER,
    }
    with pyplot.rc_context(settings):
        figure = draw(pyplot)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    rules = "".join(
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }} '
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules}}}</style>"
    svg = re.sub(r"<\?xml.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL).replace("<defs>", f"{style}\n <defs>", 1)
    svg = "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<!-- rows {digest(source)} -->\n{svg}", encoding="utf-8")


def plot_operator(source: Path, target: Path) -> None:
    """Bars of the median time of each provider in each case; on a GPU, inside a CUDA graph.

    Args:
        source: An operator's rows.
        target: The SVG file.
    """
    rows = [row for row in read_rows(source) if row.get("p50_us")]
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    rows = [row for row in rows if row["mode"] == mode]
    providers = sorted(
        {row["provider"] for row in rows}, key=lambda name: (name != "pc", not name.startswith("pc"), name)
    )
    cases = list(dict.fromkeys(row["case"] for row in rows))
    times = {(row["case"], row["provider"]): float(row["p50_us"]) for row in rows}
    colors = dict(zip(providers, (OURS_COLOR, *RIVALS * 2), strict=False))

    def draw(pyplot: Any) -> Any:
        lines = sum(1 + sum((case, name) in times for name in providers) for case in cases)
        figure, axis = pyplot.subplots(figsize=(8.6, 0.9 + 0.17 * lines), layout="constrained")
        at, ticks = 0.0, []
        for case in cases:
            shown = [name for name in providers if (case, name) in times]
            for i, name in enumerate(shown):
                value = times[case, name]
                axis.barh(at + i, value, 0.86, color=colors[name])
                axis.annotate(f" {short_time(value)}", (value, at + i), va="center", fontsize=7.5)
            ticks.append(at + (len(shown) - 1) / 2)
            at += len(shown) + 1
        axis.set(
            xscale="log", yticks=ticks, xlabel=f"median time of a call, {_unit(rows)}, less is better; logarithmic"
        )
        axis.set_yticklabels(cases)
        axis.set_ylim(at - 0.6, -0.8)
        axis.set_xlim(min(times.values()) / 4, max(times.values()) * 2.2)
        axis.xaxis.set_major_formatter(lambda value, _: short_time(value))
        axis.xaxis.set_minor_formatter("")
        axis.grid(axis="x", alpha=0.9)
        axis.set_axisbelow(True)
        axis.tick_params(length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[name]) for name in providers]
        figure.legend(handles, providers, loc="outside upper left", ncols=min(3, len(providers)), frameon=False)
        return figure

    _save(target, source, draw)


def _unit(rows: list[Row]) -> str:
    return "device time in a CUDA graph" if rows[0]["mode"] == "graph" else "wall time"


def short_time(microseconds: float) -> str:
    """A time to three digits: "14.3 us", "2.1 ms", "1.02 s"."""
    for limit, factor, unit in ((1e3, 1.0, "us"), (1e6, 1e-3, "ms"), (float("inf"), 1e-6, "s")):
        if microseconds < limit:
            return f"{microseconds * factor:.3g} {unit}"
    raise ValueError(f"microseconds: got {microseconds}")


def plot_work(source: Path, target: Path) -> None:
    """Bars of the warp instructions of each step, ours and the other's, for the newest architecture of the rows.

    Args:
        source: The rows.
        target: The SVG file.
    """
    rows = read_rows(source)
    arch = max(row["architecture"] for row in rows)
    rows = [row for row in rows if row["architecture"] == arch]
    cases, providers = (list(dict.fromkeys(row[name] for row in rows)) for name in ("case", "provider"))
    counts = {(row["case"], row["provider"]): int(row["instructions"]) for row in rows}

    def draw(pyplot: Any) -> Any:
        figure, axis = pyplot.subplots(figsize=(8.6, 0.9 + 0.5 * len(cases)), layout="constrained")
        for i, provider in enumerate(providers):
            color = OURS_COLOR if provider == "pc" else RIVALS[0]
            for place, case in enumerate(cases):
                value = counts[case, provider]
                axis.barh(place + 0.4 * i, value, 0.36, color=color, label=provider if not place else None)
                axis.annotate(f" {value / 1e6:.2f} M", (value, place + 0.4 * i), va="center", fontsize=7.5)
        axis.set(
            yticks=[place + 0.2 for place in range(len(cases))],
            xlabel=f"warp instructions of a step on {arch}, plan included, less is better; work, not time",
        )
        axis.set_yticklabels(cases)
        axis.invert_yaxis()
        axis.set_xlim(0, max(counts.values()) * 1.12)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M")
        axis.grid(axis="x", alpha=0.9)
        axis.set_axisbelow(True)
        axis.tick_params(length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return figure

    _save(target, source, draw)


def plot_demo(source: Path, target: Path) -> None:
    """Time to first token of each request of the demo, without and with the cache."""
    rows = read_rows(source)
    titles = {"document": "Eight questions about one document", "conversation": "A conversation of six rounds"}

    def draw(pyplot: Any) -> Any:
        widths = [sum(row["workload"] == name for row in rows) for name in titles]
        figure, axes = pyplot.subplots(
            1, 2, figsize=(9, 3.4), sharey=True, layout="constrained", gridspec_kw={"width_ratios": widths}
        )
        for axis, (name, title) in zip(axes, titles.items(), strict=True):
            chosen = [row for row in rows if row["workload"] == name]
            places = [int(row["request"]) for row in chosen]
            for shift, column, color, label in (
                (-0.2, "ttft_plain_s", RIVALS[0], "without the cache"),
                (0.2, "ttft_cached_s", OURS_COLOR, "with pc"),
            ):
                heights = [float(row[column]) for row in chosen]
                axis.bar([x + shift for x in places], heights, 0.4, color=color, label=label)
            for x, row in zip(places, chosen, strict=True):
                ratio = float(row["ratio"])
                label = f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
                axis.annotate(label, (x + 0.2, float(row["ttft_cached_s"])), ha="center", va="bottom", fontsize=8)
            axis.set(title=title, xlabel="request", yscale="log", xticks=places)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.grid(axis="y")
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("time to first token (s)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False)
        return figure

    _save(target, source, draw)
