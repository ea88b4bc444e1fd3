"""Charts drawn from rows of a CSV file and nothing else; one SVG serves light and dark pages."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..harness.tables import Row, read_rows
from .markdown import newest_triton, short_time
from .render_cache import COMPRESSED_REQUESTS, WORKLOADS
from .render_quality import losses

INK, PAPER, GRID = "#1f2937", "#ffffff", "#d5dae1"
DARK = {INK: "#e5e7eb", PAPER: "#1e2129", GRID: "#3d4452"}
WIDTH = 5.6  # inches: what a phone shows without making it smaller
ORACLES = {"belady": "--", "next_turn": "-."}  # lines of the policies of a replay that know the future
LONGEST_NAME = 30  # characters of which a legend of that width holds two
OURS_COLOR = "#2f74d0"
RIVALS = ("#9aa5b1", "#e0903b", "#3f9d73", "#a46bbd", "#c2564b", "#7f8c4d", "#5aa3a8", "#b08a5b")


def digest(path: Path) -> str:
    """Return a digest of the rows of a chart; the chart contains it, so that a stale chart is noticed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def drawn_from(chart: Path) -> str:
    """The digest in a chart; empty where there is none."""
    found = re.search(r"rows ([0-9a-f]{16})", chart.read_text(encoding="utf-8")) if chart.exists() else None
    return found[1] if found else ""


def _quiet(axis: Any) -> None:
    """Leaves of an axis what is read: no marks, no frame at the top and the right, lines behind what is drawn."""
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
"""Times ours to which bars are drawn; what is longer is cut off there, and says how long it is."""


def plot_operator(source: Path, target: Path) -> None:
    """Bars of each provider's time over ours in each case, from zero, with lines from the 20th to the 80th percentile.

    Args:
        source: An operator's rows; on a GPU those inside a CUDA graph are drawn.
        target: The SVG file.
    """
    rows = [row for row in read_rows(source) if row.get("p50_us")]
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    rows = [row for row in rows if row["mode"] == mode]
    providers = sorted(
        {row["provider"] for row in rows}, key=lambda name: (name != "pc", not name.startswith("pc"), name)
    )
    times = {(row["case"], row["provider"]): row for row in rows}
    cases = [case for case in dict.fromkeys(row["case"] for row in rows) if (case, "pc") in times]
    colors = dict(zip(providers, (OURS_COLOR, *RIVALS * 2), strict=False))

    def draw(pyplot: Any) -> Any:
        lines = sum(1.6 + sum((case, name) in times for name in providers) for case in cases)
        columns = 2 if max(map(len, providers)) <= LONGEST_NAME else 1
        legend = -(-len(providers) // columns)
        figure, axis = pyplot.subplots(figsize=(WIDTH, 0.8 + 0.21 * lines + 0.22 * legend), layout="constrained")
        at = 0.0
        for case in cases:
            ours = float(times[case, "pc"]["p50_us"])
            axis.annotate(case, (0, at), va="center", fontweight="bold")
            at += 0.9
            for name in providers:
                if (case, name) in times:
                    _bar(axis, at, times[case, name], ours, colors[name])
                    at += 1
            at += 0.7
        axis.axvline(1, color=GRID, zorder=0)
        axis.set(yticks=[], xlabel=f"median {_unit(rows)} of a call over that of pc, less is better")
        axis.set_ylim(at - 0.8, -0.7)
        axis.set_xlim(0, LONGEST * 1.45)
        axis.set_xticks(range(int(LONGEST) + 1))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(axis="x", alpha=0.9)
        _quiet(axis)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[name]) for name in providers]
        figure.legend(handles, providers, loc="outside upper left", ncols=columns, frameon=False)
        return figure

    _save(target, source, draw)


def _bar(axis: Any, at: float, row: Row, ours: float, color: str) -> None:
    """One provider in one case: its median over ours, its spread, its time."""
    median, low, high = (float(row.get(name) or row["p50_us"]) / ours for name in ("p50_us", "p20_us", "p80_us"))
    end = min(median, LONGEST)
    axis.barh(at, end, 0.86, color=color)
    if high <= LONGEST and high > low:
        axis.plot([low, high], [at, at], color=INK, linewidth=1, solid_capstyle="butt")
        end = max(end, high)
    cut = "" if median <= LONGEST else f"... {median:.{0 if median >= 10 else 1}f} times, "
    axis.annotate(f" {cut}{short_time(median * ours)}", (end, at), va="center", fontsize=10)


def _unit(rows: list[Row]) -> str:
    return "time in a CUDA graph" if rows[0]["mode"] == "graph" else "wall time"


def plot_work(source: Path, target: Path) -> None:
    """Bars of the warp instructions of each step, ours and the other's, for the newest triton and target of the rows.

    Args:
        source: The rows.
        target: The SVG file.
    """
    rows = read_rows(source)
    rows = newest_triton(rows)
    arch = max(row["architecture"] for row in rows)
    rows = [row for row in rows if row["architecture"] == arch]
    counts = {(row["case"], row["provider"]): int(row["instructions"]) for row in rows}
    providers = list(dict.fromkeys(provider for _, provider in counts))
    cases = [
        case for case in dict.fromkeys(case for case, _ in counts) if all((case, name) in counts for name in providers)
    ]

    def draw(pyplot: Any) -> Any:
        figure, axis = pyplot.subplots(figsize=(WIDTH, 1 + 0.66 * len(cases)), layout="constrained")
        for place, case in enumerate(cases):
            axis.annotate(case, (0, 3 * place), va="center", fontweight="bold")
            for i, provider in enumerate(providers, 1):
                value = counts[case, provider]
                color = OURS_COLOR if provider == "pc" else RIVALS[0]
                axis.barh(3 * place + 0.85 * i, value, 0.75, color=color, label=None if place else provider)
                axis.annotate(f" {value / 1e6:.2f} M", (value, 3 * place + 0.85 * i), va="center", fontsize=10)
        axis.set(yticks=[], xlabel=f"warp instructions of a step on {arch}, less is better; not time")
        axis.set_ylim(3 * len(cases) - 0.7, -0.7)
        axis.set_xlim(0, max(counts.values()) * 1.2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M")
        axis.grid(axis="x", alpha=0.9)
        _quiet(axis)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return figure

    _save(target, source, draw)


def plot_reuse(source: Path, target: Path) -> None:
    """CPU time over what plain generate takes, for each model and prompt: first token, 64 tokens, decoding."""
    rows = [row for row in read_rows(source) if row["call"] == "warm" and row["way"] != "plain"]
    cases = list(dict.fromkeys((row["model"].split(",")[0], int(row["prompt_tokens"])) for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    panels = {
        "s_1_over_plain": "first token",
        "s_64_over_plain": "answer of 64",
        "decode_s_over_plain": "a token of decoding",
    }

    def draw(pyplot: Any) -> Any:
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(9, 0.9 + 0.55 * len(cases)), sharey=True, layout="constrained"
        )
        for axis, (column, title) in zip(axes, panels.items(), strict=True):
            for i, way in enumerate(ways):
                color = OURS_COLOR if way == "pc" else RIVALS[i - 1]
                for place, (model, tokens) in enumerate(cases):
                    own = [r for r in rows if r["model"].startswith(model + ",") and int(r["prompt_tokens"]) == tokens]
                    value = float(next(r for r in own if r["way"] == way)[column])
                    axis.barh(place + 0.27 * i, value, 0.25, color=color, label=None if place else way)
                    axis.annotate(f" {value:.2f}", (value, place + 0.27 * i), va="center", fontsize=7.5)
            axis.axvline(1, color=INK, linewidth=0.8)
            axis.set(title=title, xlim=(0, 1.3), yticks=[place + 0.27 for place in range(len(cases))])
            axis.set_yticklabels([f"{model}, {tokens:,} tokens" for model, tokens in cases])
            axis.grid(axis="x")
            _quiet(axis)
            axis.spines["left"].set_visible(False)
        axes[0].invert_yaxis()
        axes[1].set_xlabel("CPU time over that of plain generate, less is better")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)
        return figure

    _save(target, source, draw)


Lines = dict[str, list[tuple[float, float]]]


def _plot_losses(
    source: Path, target: Path, lines: Lines, colors: Sequence[str], height: float, finish: Callable[[Any], None]
) -> None:
    """KL divergence, a line each; `finish` says what of the axis it is against."""

    def draw(pyplot: Any) -> Any:
        figure, axis = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
        for color, (name, points) in zip(colors, lines.items(), strict=True):
            axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=name)
        axis.set(yscale="log", ylabel="KL divergence, nats")
        finish(axis)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(axis="both")
        _quiet(axis)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return figure

    _save(target, source, draw)


def plot_quality(source: Path, target: Path) -> None:
    """KL divergence from full attention against the budget, a line for each method that has several."""
    lines: Lines = {}
    for (kind, name, budget), loss in losses(read_rows(source)).items():
        if kind in ("evicted", "chosen"):
            lines.setdefault(name, []).append((budget, loss["kl"]))
    budgets = sorted({budget for points in lines.values() for budget, _ in points})

    def finish(axis: Any) -> None:
        axis.set(xscale="log", xlabel="share of the prompt that is read")
        axis.set_xticks(budgets, [f"{budget:.0%}" for budget in budgets])
        axis.minorticks_off()

    _plot_losses(source, target, lines, (RIVALS[4], *RIVALS[1:4], OURS_COLOR, RIVALS[0]), 4.4, finish)


def plot_anywhere(source: Path, target: Path) -> None:
    """KL divergence against the time to the first token over that of prefix caching: a line for each workload."""
    rows = [row for row in read_rows(source) if row["way"] == "anywhere" and row["recompute"] != "1"]
    rows = [row for row in rows if int(row["size"]) == min(int(row["size"]) for row in rows)]
    rows.sort(key=lambda row: float(row["recompute"]))
    points = [(row, (float(row["over_prefix_cpu"]), float(row["kl"]))) for row in rows]
    lines = {name: [at for row, at in points if row["workload"] == workload] for workload, name in WORKLOADS.items()}

    def finish(axis: Any) -> None:
        for row, at in sorted(points, key=lambda point: list(WORKLOADS).index(point[0]["workload"])):
            axis.annotate(f"{float(row['recompute']):.0%}", at, (4, 4), textcoords="offset points", fontsize=8)
        axis.set(xlabel="time to first token, of prefix caching's")

    _plot_losses(source, target, lines, (OURS_COLOR, RIVALS[1], RIVALS[2]), 3.6, finish)


def _plot_hits(
    source: Path, target: Path, lines: Lines, levels: dict[str, float], finish: Callable[[Any], None]
) -> None:
    """Hit rates: a line for each policy, dashed for those that know the future, and a level for each that is alone."""
    others = [name for name in lines if name not in ("lru", "hazard", *ORACLES)]
    colors = {"lru": RIVALS[0], "hazard": OURS_COLOR} | dict(zip(others, RIVALS[1:], strict=False))

    def draw(pyplot: Any) -> Any:
        figure, axis = pyplot.subplots(figsize=(WIDTH, 3.8), layout="constrained")
        for name, points in lines.items():
            style = (
                {"marker": "o", "color": colors[name]} if name in colors else {"linestyle": ORACLES[name], "color": INK}
            )
            axis.plot(*zip(*sorted(points), strict=True), markersize=4, label=name, **style)
        for name, rate in levels.items():
            axis.axhline(rate, linestyle=":", color=colors.get(name, INK), label=f"{name}, without hints")
        axis.set(ylabel="share of blocks hit")
        finish(axis)
        axis.set_ylim(bottom=0)
        axis.grid(axis="both")
        _quiet(axis)
        figure.legend(loc="outside upper left", ncols=2 if levels else 3, frameon=False)
        return figure

    _save(target, source, draw)


def plot_replay(source: Path, target: Path) -> None:
    """Hit rate of a replayed trace against capacity, a line for each policy."""
    rows = read_rows(source)
    lines: Lines = {}
    for row in rows:
        lines.setdefault(row["policy"], []).append((float(row["capacity_share"]), float(row["hit_rate"])))
    shares = sorted({float(row["capacity_share"]) for row in rows})

    def finish(axis: Any) -> None:
        axis.set(xscale="log", xlabel="capacity, share of the trace's unique blocks")
        axis.set_xticks(shares, [f"{share:.0%}" for share in shares])
        axis.minorticks_off()

    _plot_hits(source, target, lines, {}, finish)


def plot_hints(source: Path, target: Path) -> None:
    """Hit rate of a replayed trace against how good the caller's hints are; policies without hints are level."""
    lines: Lines = {}
    levels: dict[str, float] = {}
    for row in read_rows(source):
        if row["hints"] == "none":
            levels[row["policy"]] = float(row["hit_rate"])
        else:
            quality = 1.0 if row["hints"] == "oracle" else float(row["hints"])
            lines.setdefault(row["policy"], []).append((quality, float(row["hit_rate"])))

    def finish(axis: Any) -> None:
        axis.set(xlabel="quality of the hint (AUC): 0.5 is a guess, 1 the future")

    _plot_hits(source, target, lines, levels, finish)


def plot_vllm_compression(source: Path, target: Path) -> None:
    """Plot requests a minute of each budget over those of the exact prompt, and how many answers are right."""
    rows = read_rows(source)
    kinds = list(dict.fromkeys(row["requests_of"] for row in rows))

    def draw(pyplot: Any) -> Any:
        figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 0.7 + 0.32 * len(rows)), sharey=True, layout="constrained")
        titles = ("requests a minute, 100% = 1", "right answers")
        for axis, title in zip(axes, titles, strict=True):
            axis.set(yticks=[], xlabel=title)
            axis.grid(axis="x")
            _quiet(axis)
        at = 0.0
        for kind in kinds:
            axes[0].annotate(COMPRESSED_REQUESTS[kind], (0, at), va="center", fontweight="bold")
            for row in (row for row in rows if row["requests_of"] == kind):
                at += 1
                budget, color = float(row["budget"]), RIVALS[0] if row["budget"] == "1" else OURS_COLOR
                right, asked = int(row["right"]), int(row["requests"])
                rate = float(row["rate_over_exact"])
                for axis, value, text in (
                    (axes[0], rate, f"{budget:.0%}: {rate:.2f}"),
                    (axes[1], right / asked, f"{right} of {asked}"),
                ):
                    axis.barh(at, value, 0.8, color=color)
                    axis.annotate(f" {text}", (value, at), va="center", fontsize=10)
            at += 1.3
        axes[0].set_ylim(at - 0.7, -0.7)
        axes[0].set_xlim(0, 1.5 * max(float(row["rate_over_exact"]) for row in rows))
        axes[1].set_xlim(0, 1.5)
        axes[1].set_xticks([0, 0.5, 1], ["0", "half", "all"])
        return figure

    _save(target, source, draw)


def plot_demo(source: Path, target: Path) -> None:
    """Plot the reused tokens of each request of the demo, and its time to the first token with and without cache."""
    from pc.demo._plot import draw_requests
    from pc.demo._report import TITLES

    _save(target, source, lambda pyplot: draw_requests(pyplot, read_rows(source), TITLES))
