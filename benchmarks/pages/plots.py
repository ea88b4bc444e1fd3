"""Charts drawn from rows of a CSV file and nothing else; one SVG serves light and dark pages."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..harness.tables import Row, read_rows
from .markdown import short_time
from .render_quality import losses

INK, PAPER, GRID = "#1f2937", "#ffffff", "#d5dae1"
DARK = {INK: "#e5e7eb", PAPER: "#1e2129", GRID: "#3d4452"}
WIDTH = 5.6  # inches: what a phone shows without making it smaller
ORACLES = {"belady": "--", "next_turn": "-."}  # styles of the policies that know the future
LONGEST_NAME = 28  # characters; a legend of that width holds two such names in a line
OURS_COLOR = "#2f74d0"
RIVALS = ("#9aa5b1", "#e0903b", "#3f9d73", "#a46bbd", "#c2564b", "#7f8c4d", "#5aa3a8", "#b08a5b")


def digest(path: Path) -> str:
    """Return a digest of the rows of a chart; the chart contains it, so that a stale chart is noticed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def drawn_from(chart: Path) -> str:
    """Return the digest in a chart, or an empty text if there is none."""
    found = re.search(r"rows ([0-9a-f]{16})", chart.read_text(encoding="utf-8")) if chart.exists() else None
    return found[1] if found else ""


def _quiet(axis: Any) -> None:
    """Remove an axis's marks and its frame at the top and the right, and put grid lines behind the data."""
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.spines[["top", "right"]].set_visible(False)


def _save(path: Path, source: Path, draw: Callable[[Any], Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": path.name,
        "font.size": 11,
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


LONGEST = 4.0
"""Times ours to which bars are drawn; a longer bar is cut off there, and its text has its length."""


def plot_operator(source: Path, target: Path) -> None:
    """Draw each provider's time over ours in each case, with lines from the 20th to the 80th percentile.

    Args:
        source: An operator's rows; on a GPU those inside a CUDA graph are drawn.
        target: The SVG file.
    """
    rows = [row for row in read_rows(source) if row.get("p50_us")]
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    times = {(row["case"], row["provider"]): row for row in rows if row["mode"] == mode}
    cases = [case for case in dict.fromkeys(case for case, _ in times) if (case, "pc") in times]
    names = sorted({name for _, name in times}, key=lambda name: (name != "pc", not name.startswith("pc"), name))
    colors = dict(zip(names, (OURS_COLOR, *RIVALS * 2), strict=False))
    groups = {case: [name for name in colors if (case, name) in times] for case in cases}
    columns = 1 if any(len(name) > LONGEST_NAME for name in colors) else 2
    lines = sum(len(group) + 1.6 for group in groups.values())
    unit = "time in a CUDA graph" if mode == "graph" else "wall time"

    def draw(pyplot: Any) -> Any:
        height = 0.8 + 0.21 * lines + 0.22 * -(-len(colors) // columns)
        figure, axis = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
        at = 0.0
        for case, group in groups.items():
            axis.annotate(case, (0, at), va="center", fontweight="bold")
            for place, name in enumerate(group, 1):
                _draw_bar(axis, at + place, times[case, name], float(times[case, "pc"]["p50_us"]), colors[name])
            at += len(group) + 1.6
        label = f"median {unit} of a call over that of pc, less is better"
        axis.set(yticks=[], xlabel=label, xlim=(0, LONGEST * 1.45))
        axis.set_ylim(at - 0.8, -0.7)
        axis.set_xticks(range(int(LONGEST) + 1))
        axis.grid(axis="x", alpha=0.9)
        _quiet(axis)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
        figure.legend(handles, list(colors), loc="outside upper left", ncols=columns, frameon=False)
        return figure

    _save(target, source, draw)


def _draw_bar(axis: Any, at: float, row: Row, ours: float, color: str) -> None:
    """Draw a time over ours with its text, and a line over its spread if that is not cut off."""
    median, low, high = (float(row.get(name) or row["p50_us"]) / ours for name in ("p50_us", "p20_us", "p80_us"))
    cut = "" if median <= LONGEST else f"... {median:.{0 if median >= 10 else 1}f} times, "
    has_spread = low < high <= LONGEST
    axis.barh(at, min(median, LONGEST), 0.86, color=color)
    if has_spread:
        axis.plot((low, high), [at, at], color=INK, linewidth=1, solid_capstyle="butt")
    end = max(min(median, LONGEST), high if has_spread else 0)
    axis.annotate(f" {cut}{short_time(median * ours)}", (end, at), va="center", fontsize=10)


Lines = dict[str, list[tuple[float, float]]]


def _plot_lines(
    source: Path, target: Path, lines: Lines, styles: Mapping[str, Mapping[str, Any]], height: float, **axes: Any
) -> None:
    """Draw a line of values by share for each name; `axes` are the axis's settings."""

    def draw(pyplot: Any) -> Any:
        figure, axis = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), markersize=4, label=name, **({"marker": "o"} | styles[name]))
        axis.set(xscale="log", **axes)
        shares = sorted({share for points in lines.values() for share, _ in points})
        axis.set_xticks(shares, [f"{share:.0%}" for share in shares])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(axis="both")
        _quiet(axis)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return figure

    _save(target, source, draw)


def plot_quality(source: Path, target: Path) -> None:
    """Draw KL divergence from full attention against the budget, a line for each method that has several."""
    lines: Lines = {}
    for (kind, name, budget), loss in losses(read_rows(source)).items():
        if kind in ("pressed", "chosen"):
            lines.setdefault(name, []).append((budget, loss["kl"]))
    styles = {name: {"color": color} for name, color in zip(lines, (OURS_COLOR, *RIVALS), strict=False)}
    labels = {"xlabel": "share of the prompt that is read", "ylabel": "KL divergence, nats"}
    _plot_lines(source, target, lines, styles, 4.4, yscale="log", **labels)


def plot_replay(source: Path, target: Path) -> None:
    """Draw the hit rate of a replayed trace against capacity, a line for each policy, dashed for those that know it."""
    lines: Lines = {}
    for row in read_rows(source):
        lines.setdefault(row["policy"], []).append((float(row["capacity_share"]), float(row["hit_rate"])))
    others = [name for name in lines if name not in ("lru", "hazard", *ORACLES)]
    colors = {"lru": RIVALS[0], "hazard": OURS_COLOR} | dict(zip(others, RIVALS[1:], strict=False))
    styles = {name: {"color": color} for name, color in colors.items()}
    styles |= {name: {"linestyle": style, "color": INK, "marker": ""} for name, style in ORACLES.items()}
    lines = {name: sorted(points) for name, points in lines.items()}
    labels = {"xlabel": "capacity, share of the trace's unique blocks", "ylabel": "share of blocks hit"}
    _plot_lines(source, target, lines, styles, 3.8, ylim=(0, None), **labels)


def plot_demo(source: Path, target: Path) -> None:
    """Draw the reused tokens of each request of the demo, and its time to the first token with and without cache."""
    from pc.demo._plot import draw_requests
    from pc.demo._report import TITLES

    _save(target, source, lambda pyplot: draw_requests(pyplot, read_rows(source), TITLES))
