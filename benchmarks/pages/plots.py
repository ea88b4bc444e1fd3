"""Charts drawn from rows of a CSV file and nothing else; one SVG serves light and dark pages."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.tables import Row, read_rows
from .markdown import newest_triton, short_time
from .render_quality import losses
from .tables import WORDS

INK, PAPER, GRID = "#1f2937", "#ffffff", "#d5dae1"
DARK = {INK: "#e5e7eb", PAPER: "#1e2129", GRID: "#3d4452"}
WIDTH = 5.6  # inches: what a phone shows without making it smaller
ORACLES = {"belady": "--", "next_turn": "-."}  # styles of the policies that know the future
LONGEST_NAME = 30  # characters; a legend of that width holds two such names in a line
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


class Bar(NamedTuple):
    """A horizontal bar with a text behind it, and a line over the spread of its value."""

    length: float
    text: str
    color: str
    spread: tuple[float, float] | None = None


class Panel(NamedTuple):
    """Groups of bars over one axis."""

    label: str
    groups: Mapping[str, Sequence[Bar]]
    most: float
    """End of the axis."""
    ticks: Mapping[float, str] | None = None


def _plot_bars(
    source: Path, target: Path, panels: Sequence[Panel], colors: Mapping[str, str], width: float = WIDTH
) -> None:
    """Draw panels side by side, each group of bars below its name, and a legend of the colors above them."""
    columns = 1 if any(len(name) > LONGEST_NAME for name in colors) else max(2, len(panels))
    lines = sum(len(bars) + 1.6 for bars in panels[0].groups.values())

    def draw(pyplot: Any) -> Any:
        height = 0.8 + 0.21 * lines + 0.22 * -(-len(colors) // columns)
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(width, height), sharey=True, squeeze=False, layout="constrained"
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            at = 0.0
            for name, bars in panel.groups.items():
                if axis is axes[0][0]:
                    axis.annotate(name, (0, at), va="center", fontweight="bold")
                for place, bar in enumerate(bars, 1):
                    _draw_bar(axis, at + place, bar)
                at += len(bars) + 1.6
            axis.set(yticks=[], xlabel=panel.label, xlim=(0, panel.most))
            axis.set_ylim(at - 0.8, -0.7)
            axis.xaxis.set_major_formatter("{x:g}")
            if panel.ticks:
                axis.set_xticks(list(panel.ticks), list(panel.ticks.values()))
            axis.grid(axis="x", alpha=0.9)
            _quiet(axis)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
        figure.legend(handles, list(colors), loc="outside upper left", ncols=columns, frameon=False)
        return figure

    _save(target, source, draw)


def _draw_bar(axis: Any, at: float, bar: Bar) -> None:
    axis.barh(at, bar.length, 0.86, color=bar.color)
    if bar.spread:
        axis.plot(bar.spread, [at, at], color=INK, linewidth=1, solid_capstyle="butt")
    end = max(bar.length, bar.spread[1] if bar.spread else 0)
    axis.annotate(f" {bar.text}", (end, at), va="center", fontsize=10)


def _colors(providers: Sequence[str]) -> dict[str, str]:
    """Return a color for each provider, ours first."""
    return dict(zip(providers, (OURS_COLOR, *RIVALS * 2), strict=False))


def plot_operator(source: Path, target: Path) -> None:
    """Draw each provider's time over ours in each case, with lines from the 20th to the 80th percentile.

    Args:
        source: An operator's rows; on a GPU those inside a CUDA graph are drawn.
        target: The SVG file.
    """
    rows = [row for row in read_rows(source) if row.get("p50_us")]
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    times = {(row["case"], row["provider"]): row for row in rows if row["mode"] == mode}
    names = {name for _, name in times}
    colors = _colors(sorted(names, key=lambda name: (name != "pc", not name.startswith("pc"), name)))

    def bar(row: Row, ours: float) -> Bar:
        median, low, high = (float(row.get(name) or row["p50_us"]) / ours for name in ("p50_us", "p20_us", "p80_us"))
        cut = "" if median <= LONGEST else f"... {median:.{0 if median >= 10 else 1}f} times, "
        text = f"{cut}{short_time(median * ours)}"
        return Bar(min(median, LONGEST), text, colors[row["provider"]], (low, high) if low < high <= LONGEST else None)

    groups = {}
    for case in dict.fromkeys(case for case, _ in times):
        if (case, "pc") in times:
            ours = float(times[case, "pc"]["p50_us"])
            groups[case] = [bar(times[case, name], ours) for name in colors if (case, name) in times]
    unit = "time in a CUDA graph" if mode == "graph" else "wall time"
    label = f"median {unit} of a call over that of pc, less is better"
    ticks = {float(at): str(at) for at in range(int(LONGEST) + 1)}
    _plot_bars(source, target, [Panel(label, groups, LONGEST * 1.45, ticks)], colors)


def plot_work(source: Path, target: Path) -> None:
    """Draw the warp instructions of each step, ours and the other's, for the newest triton and target of the rows."""
    rows = newest_triton(read_rows(source))
    arch = max(row["architecture"] for row in rows)
    counts = {
        (row["case"], row["provider"]): int(row["instructions"]) / 1e6 for row in rows if row["architecture"] == arch
    }
    colors = _colors(list(dict.fromkeys(provider for _, provider in counts)))
    groups = {
        case: [Bar(counts[case, name], f"{counts[case, name]:.2f} M", color) for name, color in colors.items()]
        for case in dict.fromkeys(case for case, _ in counts)
        if all((case, name) in counts for name in colors)
    }
    label = f"million warp instructions of a step on {arch}, less is better; not time"
    _plot_bars(source, target, [Panel(label, groups, max(counts.values()) * 1.2)], colors)


def plot_reuse(source: Path, target: Path) -> None:
    """Draw CPU time over that of plain generate, for each model and prompt: first token, 64 tokens, decoding."""
    rows = [row for row in read_rows(source) if row["call"] == "warm" and row["way"] != "plain"]
    colors = _colors(list(dict.fromkeys(row["way"] for row in rows)))
    titles = {
        "s_1_over_plain": "first token",
        "s_64_over_plain": "answer of 64",
        "decode_s_over_plain": "a token of decoding",
    }
    panels = []
    for column, title in titles.items():
        groups: dict[str, list[Bar]] = {}
        for row in rows:
            name = f"{row['model'].split(',')[0]}, {int(row['prompt_tokens']):,} tokens"
            bar = Bar(float(row[column]), f"{float(row[column]):.2f}", colors[row["way"]])
            groups.setdefault(name, []).append(bar)
        panels.append(Panel(f"{title}, plain = 1", groups, 1.5))
    _plot_bars(source, target, panels, colors, 9)


def plot_vllm_compression(source: Path, target: Path) -> None:
    """Draw requests a minute of each budget over those of the exact prompt, and how many answers are right."""
    rows = read_rows(source)
    rates: dict[str, list[Bar]] = {}
    answers: dict[str, list[Bar]] = {}
    colors = {"exact": RIVALS[0], "compressed": OURS_COLOR}
    for row in rows:
        name, rate, right, asked = (
            WORDS[row["requests_of"]],
            *(float(row[column]) for column in ("rate_over_exact", "right", "requests")),
        )
        color = colors["exact" if row["budget"] == "1" else "compressed"]
        rates.setdefault(name, []).append(Bar(rate, f"{float(row['budget']):.0%}: {rate:.2f}", color))
        answers.setdefault(name, []).append(Bar(right / asked, f"{right:.0f} of {asked:.0f}", color))
    most = 1.5 * max(float(row["rate_over_exact"]) for row in rows)
    shares = {0.0: "0", 0.5: "half", 1.0: "all"}
    panels = [Panel("requests a minute, 100% = 1", rates, most), Panel("right answers", answers, 1.5, shares)]
    _plot_bars(source, target, panels, colors)


Lines = dict[str, list[tuple[float, float]]]


def _plot_lines(
    source: Path,
    target: Path,
    lines: Lines,
    styles: Mapping[str, Mapping[str, Any]],
    height: float,
    finish: Callable[[Any], None],
    **axes: str,
) -> None:
    """Draw a line for each name; `finish` adds to the axis, and `axes` are the axis's settings."""

    def draw(pyplot: Any) -> Any:
        figure, axis = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), markersize=4, label=name, **styles[name])
        axis.set(**axes)
        finish(axis)
        axis.grid(axis="both")
        _quiet(axis)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return figure

    _save(target, source, draw)


def _plot_losses(
    source: Path, target: Path, lines: Lines, colors: Sequence[str], height: float, finish: Callable[[Any], None]
) -> None:
    styles = {name: {"color": color, "marker": "o"} for name, color in zip(lines, colors, strict=True)}

    def formatted(axis: Any) -> None:
        finish(axis)
        axis.yaxis.set_major_formatter("{x:g}")

    _plot_lines(source, target, lines, styles, height, formatted, yscale="log", ylabel="KL divergence, nats")


def _share_ticks(label: str, shares: Sequence[float]) -> Callable[[Any], None]:
    """Return a function that makes an axis logarithmic, with ticks at some shares."""

    def finish(axis: Any) -> None:
        axis.set(xscale="log", xlabel=label)
        axis.set_xticks(shares, [f"{share:.0%}" for share in shares])
        axis.minorticks_off()

    return finish


def plot_quality(source: Path, target: Path) -> None:
    """Draw KL divergence from full attention against the budget, a line for each method that has several."""
    lines: Lines = {}
    for (kind, name, budget), loss in losses(read_rows(source)).items():
        if kind in ("evicted", "chosen"):
            lines.setdefault(name, []).append((budget, loss["kl"]))
    budgets = sorted({budget for points in lines.values() for budget, _ in points})
    colors = (RIVALS[4], *RIVALS[1:4], OURS_COLOR, RIVALS[0])
    _plot_losses(source, target, lines, colors, 4.4, _share_ticks("share of the prompt that is read", budgets))


def plot_anywhere(source: Path, target: Path) -> None:
    """Draw KL divergence against the time to the first token over prefix caching's, a line for each workload."""
    rows = [row for row in read_rows(source) if row["way"] == "anywhere" and row["recompute"] != "1"]
    rows = [row for row in rows if int(row["size"]) == min(int(row["size"]) for row in rows)]
    rows.sort(key=lambda row: float(row["recompute"]))
    points = [(row, (float(row["over_prefix_cpu"]), float(row["kl"]))) for row in rows]
    lines = {WORDS[name]: [at for row, at in points if row["workload"] == name] for name in ("order", "agent", "edit")}

    def finish(axis: Any) -> None:
        for row, at in points:
            axis.annotate(f"{float(row['recompute']):.0%}", at, (4, 4), textcoords="offset points", fontsize=8)
        axis.set(xlabel="time to first token, of prefix caching's")

    _plot_losses(source, target, lines, (OURS_COLOR, RIVALS[1], RIVALS[2]), 3.6, finish)


def _plot_hits(
    source: Path, target: Path, lines: Lines, levels: dict[str, float], finish: Callable[[Any], None]
) -> None:
    """Draw hit rates: a line for each policy, dashed for those that know the future, and levels of policies alone."""
    others = [name for name in lines if name not in ("lru", "hazard", *ORACLES)]
    colors = {"lru": RIVALS[0], "hazard": OURS_COLOR} | dict(zip(others, RIVALS[1:], strict=False))
    styles = {name: {"marker": "o", "color": color} for name, color in colors.items()}
    styles |= {name: {"linestyle": style, "color": INK} for name, style in ORACLES.items()}

    def levelled(axis: Any) -> None:
        for name, rate in levels.items():
            axis.axhline(rate, linestyle=":", color=colors.get(name, INK), label=f"{name}, without hints")
        finish(axis)
        axis.set_ylim(bottom=0)

    lines = {name: sorted(points) for name, points in lines.items()}
    _plot_lines(source, target, lines, styles, 3.8, levelled, ylabel="share of blocks hit")


def plot_replay(source: Path, target: Path) -> None:
    """Draw the hit rate of a replayed trace against capacity, a line for each policy."""
    rows = read_rows(source)
    lines: Lines = {}
    for row in rows:
        lines.setdefault(row["policy"], []).append((float(row["capacity_share"]), float(row["hit_rate"])))
    shares = sorted({float(row["capacity_share"]) for row in rows})
    _plot_hits(source, target, lines, {}, _share_ticks("capacity, share of the trace's unique blocks", shares))


def plot_hints(source: Path, target: Path) -> None:
    """Draw the hit rate of a replayed trace against the quality of the caller's hints; others are level lines."""
    lines: Lines = {}
    levels: dict[str, float] = {}
    for row in read_rows(source):
        if row["hints"] == "none":
            levels[row["policy"]] = float(row["hit_rate"])
        else:
            quality = 1.0 if row["hints"] == "oracle" else float(row["hints"])
            lines.setdefault(row["policy"], []).append((quality, float(row["hit_rate"])))
    label = "quality of the hint (AUC): 0.5 is a guess, 1 the future"
    _plot_hits(source, target, lines, levels, lambda axis: axis.set(xlabel=label))


def plot_demo(source: Path, target: Path) -> None:
    """Draw the reused tokens of each request of the demo, and its time to the first token with and without cache."""
    from pc.demo._plot import draw_requests
    from pc.demo._report import TITLES

    _save(target, source, lambda pyplot: draw_requests(pyplot, read_rows(source), TITLES))
