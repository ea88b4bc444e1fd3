"""The table of other projects' tests that run against `pc`: passed, failed, and left out with the reason."""

from __future__ import annotations

from pathlib import Path

from ..harness.tables import RESULTS, Row, read_rows
from .markdown import link, table

SOURCE = RESULTS / "cpu" / "judges.csv"
TITLES = {
    "flash-attn-2": "FlashAttention 2, `tests/test_flash_attn.py`",
    "flash-attn-3": "FlashAttention 3, `hopper/test_flash_attn.py`",
    "flashinfer": "FlashInfer, references of `flashinfer/trace`",
    "vllm-lru": "vLLM, `tests/v1/core`, `lru` behind its block pools",
    "vllm-default": "vLLM, `tests/v1/core`, `default` behind its block pools",
    "vllm-attention": "vLLM, `tests/kernels/attention`, unified attention",
    "kvpress": "kvpress, its presses beside its own decoding",
}


def _count(rows: list[Row], outcome: str) -> int:
    return sum(int(row["cases"]) for row in rows if row["outcome"] == outcome)


def render_judges(page: Path) -> str:
    """Render a line for each judge: cases, outcomes, reasons."""
    by_judge: dict[str, list[Row]] = {}
    for row in read_rows(SOURCE):
        by_judge.setdefault(row["judge"], []).append(row)
    lines = []
    for judge, rows in by_judge.items():
        left = sorted((row for row in rows if row["reason"]), key=lambda row: -int(row["cases"]))
        reasons = "; ".join(f"{row['reason']} {int(row['cases']):,}" for row in left)
        total = sum(int(row["cases"]) for row in rows)
        counts = (f"{total:,}", f"{_count(rows, 'passed'):,}", f"{_count(rows, 'failed'):,}")
        lines.append((TITLES[judge], rows[0]["package"].partition("==")[2], *counts, reasons))
    heads = ("tests", "version", "cases", "passed", "failed", "left out")
    said = f"\nWith which seed and when: [rows]({link(page, SOURCE)})."
    return "\n".join((*table(heads, "llrrrl", lines), said))


def render_judges_summary(page: Path) -> str:
    """Render the number of cases that passed, in a sentence."""
    rows = read_rows(SOURCE)
    passed, failed = _count(rows, "passed"), _count(rows, "failed")
    return f"{passed:,} cases of other projects' tests pass with our functions, and {failed:,} fail"
