"""The table of what reusing text that moved saves and loses."""

from __future__ import annotations

from pathlib import Path

from ..harness.tables import Row, read_rows
from .markdown import chart, measured, results, table

SOURCE = ("cpu", "reuse_anywhere.csv")
LOOKUP = ("cpu", "lookup_anywhere.csv")
WORKLOADS = {
    "order": "five documents, six orders",
    "agent": "an agent drops results",
    "edit": "an edit in the middle",
}
WAYS = {"all": "everything computed", "prefix": "prefix caching", "anywhere": "anywhere"}


def anywhere_rows() -> list[Row]:
    """Of every workload, longest prompts last."""
    order = list(WORKLOADS)
    return sorted(
        read_rows(results(*SOURCE)),
        key=lambda row: (
            int(row["size"]),
            order.index(row["workload"]),
            list(WAYS).index(row["way"]),
            row["recompute"],
        ),
    )


def render_anywhere(page: Path) -> str:
    """Time to the first token and loss by workload and share."""
    heads = (
        "workload",
        "prompt",
        "reuse",
        "again",
        "computed",
        "first token, s",
        "of prefix",
        "KL",
        "same top",
        "answers",
    )
    lines = []
    for row in anywhere_rows():
        exact = row["way"] != "anywhere"
        lines.append(
            (
                WORKLOADS[row["workload"]],
                row["prompt_tokens"],
                WAYS[row["way"]],
                "" if exact else f"{float(row['recompute']):.0%}",
                row["computed_tokens"],
                f"{float(row['ttft_cpu_s']):.2f}",
                "" if row["way"] == "all" else f"{float(row['over_prefix_cpu']):.2f}",
                "" if exact else "0" if float(row["kl"]) < 1e-7 else f"{float(row['kl']):.2g}",
                "" if exact else f"{float(row['same_top1']):.1%}",
                "" if exact else f"{row['answers']} of {row['prompts']}",
            )
        )
    return "\n".join(table(heads, "lrlrrrrrrr", lines))


def render_anywhere_conditions(page: Path) -> str:
    """Model and machine."""
    rows = anywhere_rows()
    said = measured(page, results(*SOURCE), rows, ("torch", "transformers"))
    return f"{rows[0]['model']} in {rows[0]['dtype']}. {said}"


def render_anywhere_chart(page: Path) -> str:
    """The chart of loss against time."""
    return f"![Loss against time to the first token]({chart(page, 'reuse_anywhere.svg')})"


def render_lookup_anywhere(page: Path) -> str:
    """What it costs to look for text that moved."""
    rows = read_rows(results(*LOOKUP))
    heads = ("prompt", "cached elsewhere", "prefix, ms", "anywhere, ms", "ratio", "whole request")
    lines = [
        (
            f"{int(row['tokens']):,}",
            row["found"],
            *(f"{float(row[name]) / 1000:.2f}" for name in ("plain_us", "anywhere_us")),
            *(f"{float(row[name]):.2f}" for name in ("over_plain", "request_over_plain")),
        )
        for row in rows
    ]
    said = measured(page, results(*LOOKUP), rows)
    return "\n".join([*table(heads, "rlrrrr", lines), "", said])
