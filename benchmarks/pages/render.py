"""Renders the numbers and charts of README and docs from the rows in the tree: `python -m benchmarks render`.

A page says where with `<!-- render: name arguments -->` and `<!-- /render -->`; what is between is replaced. A test
renders again and compares, and refuses a measurement that stands anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ..harness.registry import ROOT, operators
from ..harness.tables import RESULTS, read_rows
from . import render_judges, render_models, render_operators, render_quality
from .markdown import CHARTS, devices
from .plots import digest, drawn_from, plot_demo, plot_operator, plot_quality, plot_replay
from .tables import TABLES

MARKED = re.compile(r"(<!-- render: ([^>]*?) -->)(.*?)(<!-- /render -->)", re.DOTALL)
_COMPARED = r"faster|slower|sooner|later|quicker|less|more|fewer|of (?:the )?(?:roofline|peak|copy|bandwidth|time)"
MEASUREMENT = re.compile(
    r"\b\d[\d,.]*\s?(?:(?:x|times|ns|us|µs|ms|s|seconds|minutes|[KMGT]B/s|[GT]FLOP/s|tokens a second|tokens/s)(?!\w)|"
    rf"%\s(?:{_COMPARED}))"
)
EXEMPT = "<!-- not measured"


def pages() -> list[Path]:
    """Return every page that may state a measurement."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render_page(page: Path) -> str:
    """Return the page's text with its tables rendered."""

    def fill(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        text = RENDERERS[name](page, *arguments)
        inline = "\n" not in match[3] and "\n" not in text
        return f"{match[1]}{text}{match[4]}" if inline else f"{match[1]}\n{text}\n{match[4]}"

    return MARKED.sub(fill, page.read_text(encoding="utf-8"))


def unrendered_measurements(page: Path) -> list[str]:
    """Return lines of prose that state a measurement outside of rendered text."""
    text = MARKED.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    return [
        f"{page.name}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if EXEMPT not in line and MEASUREMENT.search(re.sub(r"`[^`]*`", "", line))
    ]


RENDERERS: dict[str, Callable[..., str]] = {name: table.render for name, table in TABLES.items()}
for _module in (render_judges, render_models, render_operators, render_quality):
    RENDERERS |= {n.removeprefix("render_"): f for n, f in vars(_module).items() if n.startswith("render_")}


def charts() -> dict[Path, tuple[Path, Callable[[Path, Path], None]]]:
    """Return every chart, with its rows and the function that draws it."""
    found: dict[Path, tuple[Path, Callable[[Path, Path], None]]] = {}
    for device in devices():
        for op in operators():
            if (source := RESULTS / device / f"{op}.csv").exists():
                found[CHARTS / f"{op}-{device}.svg"] = (source, plot_operator)
    for source, draw in (
        (RESULTS / "cpu" / "quality.csv", plot_quality),
        (RESULTS / "cpu" / "demo.csv", plot_demo),
        (RESULTS / "cpu" / "replay_conversation.csv", plot_replay),
    ):
        if read_rows(source):
            found[CHARTS / f"{source.stem}.svg"] = (source, draw)
    return found


def main() -> int:
    """Draw stale charts, and rewrite pages that differ."""
    for chart, (source, draw) in charts().items():
        if drawn_from(chart) != digest(source):
            draw(source, chart)
            print(f"drawn {chart.relative_to(ROOT)}")
    for page in pages():
        text = render_page(page)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"rendered {page.relative_to(ROOT)}")
    return 0
