"""Renders the numbers and charts of README and docs from the rows in the tree: `python -m benchmarks render`.

A page says where with `<!-- render: name arguments -->` and `<!-- /render -->`; what is between is replaced. A test
renders again and compares, and refuses a measurement that stands anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ..harness.registry import ROOT, operators
from ..harness.tables import read_rows
from .markdown import CHARTS, devices, results
from .plots import digest, drawn_from, plot_anywhere, plot_demo, plot_operator, plot_quality, plot_reuse, plot_work
from .render_anywhere import (
    render_anywhere,
    render_anywhere_chart,
    render_anywhere_conditions,
    render_lookup_anywhere,
)
from .render_cache import (
    render_hidden_states,
    render_hint_ways,
    render_hints,
    render_manager,
    render_omni,
    render_replay,
    render_scheduler,
    render_serving,
    render_sglang_radix,
    render_traffic,
    render_vllm_cpu,
    render_vllm_tier,
)
from .render_models import (
    demo_rows,
    render_batching,
    render_demo_conditions,
    render_demo_table,
    render_families,
    render_reuse,
)
from .render_operators import (
    render_gpu,
    render_gpu_plan,
    render_life,
    render_operator,
    render_operators,
    render_sparse,
    render_work,
    render_work_summary,
    render_work_versions,
)
from .render_quality import (
    render_quality,
    render_quality_chart,
    render_quality_conditions,
    render_quality_order,
    render_quality_summary,
)

MARKED = re.compile(r"(<!-- render: ([^>]*?) -->)(.*?)(<!-- /render -->)", re.DOTALL)
_COMPARED = r"faster|slower|sooner|later|quicker|less|more|fewer|of (?:the )?(?:roofline|peak|copy|bandwidth|time)"
MEASUREMENT = re.compile(
    r"\b\d[\d,.]*\s?(?:(?:x|times|ns|us|µs|ms|s|seconds|minutes|[KMGT]B/s|[GT]FLOP/s|tokens a second|tokens/s)(?!\w)|"
    rf"%\s(?:{_COMPARED}))"
)
EXEMPT = "<!-- not measured"


def pages() -> list[Path]:
    """Every page that may state a measurement."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render_page(page: Path) -> str:
    """The page's text as it should be."""

    def fill(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        text = RENDERERS[name](page, *arguments)
        inline = "\n" not in match[3] and "\n" not in text
        return f"{match[1]}{text}{match[4]}" if inline else f"{match[1]}\n{text}\n{match[4]}"

    return MARKED.sub(fill, page.read_text(encoding="utf-8"))


def unrendered_measurements(page: Path) -> list[str]:
    """Lines of prose that state a measurement which no row stands behind."""
    text = MARKED.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    return [
        f"{page.name}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if EXEMPT not in line and MEASUREMENT.search(re.sub(r"`[^`]*`", "", line))
    ]


RENDERERS: dict[str, Callable[..., str]] = {
    "work": render_work,
    "work_summary": render_work_summary,
    "life": render_life,
    "work_versions": render_work_versions,
    "families": render_families,
    "operator": render_operator,
    "operators": render_operators,
    "gpu": render_gpu,
    "gpu_plan": render_gpu_plan,
    "demo_conditions": render_demo_conditions,
    "demo_table": render_demo_table,
    "hidden_states": render_hidden_states,
    "omni": render_omni,
    "reuse": render_reuse,
    "scheduler": render_scheduler,
    "serving": render_serving,
    "vllm_tier": render_vllm_tier,
    "sglang_radix": render_sglang_radix,
    "sparse": render_sparse,
    "replay": render_replay,
    "hints": render_hints,
    "hint_ways": render_hint_ways,
    "traffic": render_traffic,
    "vllm_cpu": render_vllm_cpu,
    "manager": render_manager,
    "batching": render_batching,
    "quality": render_quality,
    "quality_chart": render_quality_chart,
    "quality_conditions": render_quality_conditions,
    "quality_order": render_quality_order,
    "quality_summary": render_quality_summary,
    "anywhere": render_anywhere,
    "anywhere_chart": render_anywhere_chart,
    "anywhere_conditions": render_anywhere_conditions,
    "lookup_anywhere": render_lookup_anywhere,
}


def charts() -> dict[Path, tuple[Path, Callable[[Path, Path], None]]]:
    """Every chart, with the rows it is drawn from and what draws it."""
    found: dict[Path, tuple[Path, Callable[[Path, Path], None]]] = {}
    for device in devices():
        for op in operators():
            if (source := results(device, f"{op}.csv")).exists():
                found[CHARTS / f"{op}-{device}.svg"] = (source, plot_operator)
    if read_rows(results("work.csv")):
        found[CHARTS / "work.svg"] = (results("work.csv"), plot_work)
    if read_rows(results("cpu", "reuse.csv")):
        found[CHARTS / "reuse.svg"] = (results("cpu", "reuse.csv"), plot_reuse)
    if read_rows(results("cpu", "quality.csv")):
        found[CHARTS / "quality.svg"] = (results("cpu", "quality.csv"), plot_quality)
    if read_rows(results("cpu", "reuse_anywhere.csv")):
        found[CHARTS / "reuse_anywhere.svg"] = (results("cpu", "reuse_anywhere.csv"), plot_anywhere)
    if demo_rows():
        found[CHARTS / "demo.svg"] = (results("cpu", "demo.csv"), plot_demo)
    return found


def main() -> int:
    """Draws what is stale and rewrites pages that differ."""
    for chart, (source, draw) in charts().items():
        if drawn_from(chart) != digest(source):
            draw(source, chart)
            print(f"drawn {chart.relative_to(ROOT)}")
    for page in pages():
        if page.parent.name == "ops" and page.stem in operators() and "<!-- render: operator" not in page.read_text():
            with page.open("a", encoding="utf-8") as file:
                file.write(f"\n## Benchmark\n\n<!-- render: operator {page.stem} -->\n<!-- /render -->\n")
        text = render_page(page)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"rendered {page.relative_to(ROOT)}")
    return 0
