"""The demo's chart: for each prompt the cached and the computed tokens, and the time to first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, str]]
"""Rows of the demo's CSV file."""

WIDTH = 5.6
"""Width of the chart in inches, which a phone shows without scaling."""
WITHOUT, COMPUTED, REUSED = "#9aa5b1", "#2f74d0", "#7cc49a"


def draw_requests(pyplot: Any, rows: Rows, titles: Mapping[str, str]) -> Any:
    """Draw rows of the demo's CSV file: for each workload, axes of prompts and axes of times. Return the figure.

    Args:
        pyplot: The module `matplotlib.pyplot`.
        rows: Rows of the CSV file.
        titles: Title of each workload; other workloads are not drawn.
    """
    chosen = {name: [row for row in rows if row["workload"] == name] for name in titles}
    chosen = {name: some for name, some in chosen.items() if some}
    count = sum(map(len, chosen.values()))
    figure, axes = pyplot.subplots(
        *(len(chosen), 2),
        figsize=(WIDTH, 0.9 + 0.9 * len(chosen) + 0.31 * count),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": [len(some) + 1 for some in chosen.values()], "width_ratios": [2, 3]},
    )
    for (prompts, times), (name, some) in zip(axes, chosen.items(), strict=True):
        _draw_prompts(prompts, some)
        _draw_times(times, some)
        prompts.set_title(titles[name], loc="left", fontsize=12)
        for axis in (prompts, times):
            axis.set_ylim(len(some) + 0.6, 0.4)
            axis.grid(axis="x")
            axis.set_axisbelow(True)
            axis.tick_params(length=0)
            axis.spines[["top", "right", "left"]].set_visible(False)
        times.set_yticks([])
    axes[-1][0].set_xlabel("tokens of the prompt")
    axes[-1][1].set_xlabel("first token after, s")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (REUSED, COMPUTED, WITHOUT)]
    names = ["from the cache", "computed", "without the cache"]
    figure.legend(patches, names, loc="outside upper left", ncols=3, frameon=False, columnspacing=1, handlelength=1.2)
    return figure


def _draw_prompts(axis: Any, rows: Rows) -> None:
    numbers = [int(row["request"]) for row in rows]
    axis.barh(numbers, [int(row["prompt_tokens"]) for row in rows], 0.72, color=COMPUTED)
    for number, row in zip(numbers, rows, strict=True):
        for start, end in spans_of(row["reused_spans"]):
            axis.barh(number, end - start, 0.72, left=start, color=REUSED)
    axis.set_yticks(numbers)
    axis.set_xlim(0, max(int(row["prompt_tokens"]) for row in rows))
    axis.locator_params(axis="x", nbins=3)
    axis.xaxis.set_major_formatter("{x:,.0f}")


def _draw_times(axis: Any, rows: Rows) -> None:
    longest = max(float(row["ttft_plain_s"]) for row in rows)
    for row in rows:
        number, plain, cached = int(row["request"]), float(row["ttft_plain_s"]), float(row["ttft_cached_s"])
        axis.barh(number - 0.19, plain, 0.34, color=WITHOUT)
        axis.barh(number + 0.19, cached, 0.34, color=COMPUTED)
        ratio = float(row["ratio"])
        label = f" {cached:.2g} s, {ratio:.{0 if ratio >= 10 else 1}f}x"
        axis.annotate(label, (cached, number + 0.21), va="center", fontsize=10)
    axis.set_xlim(0, longest * (1.35 if any(float(row["ratio"]) < 2 for row in rows) else 1.05))
    axis.locator_params(axis="x", nbins=4)
    axis.xaxis.set_major_formatter("{x:g}")


def spans_of(text: str) -> list[tuple[int, int]]:
    """Parse token ranges as the CSV file has them, such as "0-4864 5200-9712"."""
    return [(int(start), int(end)) for start, _, end in (span.partition("-") for span in text.split())]
