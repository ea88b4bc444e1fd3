"""Tables that are rows of a file as they come, and those of what is cached that set rows beside each other."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..harness.registry import OURS
from ..harness.tables import Row, number, read_rows
from .markdown import chart, commits, link, measured, results, short_time, table, with_rows

WORKLOADS = {
    "order": "five documents, six orders",
    "agent": "an agent drops results",
    "edit": "an edit in the middle",
}
WAYS = {"all": "everything computed", "prefix": "prefix caching", "anywhere": "anywhere"}
TIERS = {"vllm": "vLLM's `lru`", "arc": "vLLM's `arc`"}

Cell = str | Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """Rows of a file, one a line.

    Attributes:
        source: Of the file, below the CPU's results; "{}" is the page's argument.
        columns: Heads, a letter for the side (l or r), and what a line has there: a column of the file, with a format
            where it is a number ("ratio:.2f"), a text with columns in it ("{hits:,} of {tokens:,}"), or a function of
            the row.
        said: Where conditions stand: "above" or "below" the table; "rows": below it, but where the rows are alone;
            "nowhere".
        more: Behind them, or before where the rows are: a text with columns of the first row, and commits, in it.
        packages: Whose versions are among them.
        order: What rows are sorted by; None: as they come.
    """

    source: str
    columns: tuple[tuple[str, str, Cell], ...]
    said: str = "rows"
    more: str = ""
    packages: tuple[str, ...] = ("torch",)
    order: Callable[[Row], object] | None = None

    def render(self, page: Path, *arguments: str) -> str:
        """The table with what is said of it."""
        source = results("cpu", self.source.format(*arguments))
        rows = read_rows(source)
        if self.order is not None:
            rows.sort(key=self.order)  # type: ignore[arg-type]
        heads, sides, cells = zip(*self.columns, strict=True)
        lines = table(heads, "".join(sides), [[_cell(row, cell) for cell in cells] for row in rows])
        more = _Filling().vformat(self.more, (), rows[0] | {"commits": commits(source, rows)}) if self.more else ""
        if self.said == "rows":
            return with_rows(lines, page, source, more)
        conditions = "" if self.said == "nowhere" else measured(page, source, rows, self.packages, more)
        parts = {"above": [conditions, "", *lines], "below": [*lines, "", conditions], "nowhere": lines}
        return "\n".join(parts[self.said])


def _cell(row: Row, cell: Cell) -> str:
    if callable(cell):
        return cell(row)
    if "{" in cell:
        return _Filling().vformat(cell, (), row)
    name, _, form = cell.partition(":")
    return format(float(row[name]), form) if form else row[name]


class _Filling(string.Formatter):
    """Put columns into a text, as in the file, or with a format as numbers."""

    def format_field(self, value: str, spec: str) -> str:
        return format(number(value), spec) if spec else value


def time(column: str, microseconds: float = 1) -> Callable[[Row], str]:
    """A time that a column has in so many microseconds."""
    return lambda row: short_time(float(row[column]) * microseconds)


def over(one: str, other: str, form: str) -> Callable[[Row], str]:
    """A column over another."""
    return lambda row: format(float(row[one]) / float(row[other]), form)


def _not_exact(form: Cell) -> Callable[[Row], str]:
    """For ways that lose something."""
    return lambda row: _cell(row, form) if row["way"] == "anywhere" else ""


TABLES = {
    "hints": Table(
        "replay_{}.csv",
        (
            ("policy", "l", "policy"),
            ("hints", "l", "hints"),
            ("hits", "r", "hit_rate:.4f"),
            ("to lru", "r", "lru_ratio:.2f"),
        ),
    ),
    "traffic": Table(
        "traffic.csv",
        (
            ("traffic", "l", "traffic"),
            ("capacity", "r", "capacity_share"),
            ("lru", "r", "lru:.4f"),
            ("policy", "l", "policy"),
            ("hits", "r", "hit_rate:.4f"),
            ("to lru", "r", "ratio:.3f"),
            ("worst window", "r", "{worst_window:.2f} of {window:,} requests"),
        ),
    ),
    "manager": Table(
        "manager.csv",
        (
            ("peer", "l", "peer"),
            ("hash", "l", "hash"),
            ("tokens", "r", "tokens"),
            ("pc, us", "r", "pc_us"),
            ("peer, us", "r", "peer_us"),
            ("pc / peer", "r", "pc_over_peer:.2f"),
        ),
        more="{cores} cores, Python {python}, {date}, {commits}. ",
    ),
    "omni": Table(
        "vllm_omni.csv",
        (
            ("tokens x features", "l", "{tokens:,} x {features:,}"),
            ("step", "l", "what"),
            ("call", "l", "call"),
            ("pc", "r", time("pc_us")),
            ("vLLM-Omni", "r", time("peer_us")),
            ("vLLM-Omni / pc", "r", over("peer_us", "pc_us", ".1f")),
        ),
        "above",
        ", {peer}",
    ),
    "scheduler": Table(
        "vllm_scheduler.csv",
        (
            ("policy", "l", "policy"),
            ("hit rate", "r", "hit_rate"),
            ("of `pc replay`", "r", "replay_hit_rate"),
            ("CPU time of a step", "r", time("step_us")),
            ("over vLLM's own queue", "r", "over_vllm:.2f"),
        ),
        "above",
        "; {trace}, {blocks:,} blocks, {steps} steps of {requests} requests",
        (),
    ),
    "gaps": Table(
        "vllm_gaps.csv",
        (
            ("of the trace's blocks", "l", "capacity_share:.0%"),
            ("policy", "l", "`{policy}`"),
            ("reuse", "l", "`{reuse}`"),
            ("share of prompts' tokens that is computed", "r", "computed"),
            ("steps", "r", "{steps:,}"),
        ),
        "above",
        "; {trace}",
        (),
    ),
    "vllm_tier": Table(
        "vllm_tier.csv",
        (
            ("of the trace's blocks", "l", "share:.0%"),
            ("policy", "l", lambda row: TIERS.get(row["policy"], f"`{row['policy']}`")),
            ("hit rate", "r", "hit_rate"),
            ("CPU time of a request", "r", time("request_us")),
            ("over vLLM's `lru`", "r", "over_vllm:.2f"),
        ),
        "above",
        "; {trace}, {requests:,} requests",
        (),
    ),
    "serving": Table(
        "vllm_serving.csv",
        (
            ("requests", "l", "workload"),
            ("eviction", "l", "configuration"),
            ("hit rate", "r", "hit_rate:.3f"),
            ("of `pc replay`", "r", "replay_hit_rate:.3f"),
            ("first token, median", "r", "ttft_p50_over_vllm:.2f"),
            ("90th percentile", "r", "ttft_p90_over_vllm:.2f"),
            ("all requests", "r", "seconds_over_vllm:.2f"),
        ),
        "above",
        "; {requests} requests of {clients} clients, {prompt_tokens:,} tokens of prompts, {running} at once in "
        "{blocks} blocks of {block_size} tokens, {rounds} rounds; vLLM's own times to the first token are "
        "{ttft_p50:.1f} s (median) and {ttft_p90:.1f} s (90th percentile)",
        (),
    ),
    "vllm_cpu": Table(
        "vllm_cpu.csv",
        (
            ("step", "l", "step"),
            ("requests", "r", "batch"),
            ("tokens of each", "r", "context"),
            ("vLLM's backend", "r", time("vllm_ms", 1e3)),
            ("ours", "r", time("pc_ms", 1e3)),
            ("ours over vLLM's", "r", "over_vllm:.2f"),
        ),
        "above",
        "; SmolLM2-135M, float32, medians of {rounds} rounds",
    ),
    "sglang_radix": Table(
        "sglang_radix.csv",
        (
            ("policy", "l", "policy"),
            ("core", "l", "core"),
            ("hit rate", "r", "hit_rate"),
            ("of `pc replay`", "r", "replay_hit_rate"),
            ("CPU time of a request", "r", time("request_us")),
            ("over lru in Rust", "r", "over_rust:.2f"),
            ("over lru in Python", "r", "over_python:.2f"),
        ),
        "above",
        "; {trace}, {pages:,} pages; timed: {requests} requests in {timed_pages:,} pages",
        (),
    ),
    "anywhere": Table(
        "reuse_anywhere.csv",
        (
            ("workload", "l", lambda row: WORKLOADS[row["workload"]]),
            ("prompt", "r", "prompt_tokens"),
            ("reuse", "l", lambda row: WAYS[row["way"]]),
            ("again", "r", _not_exact("recompute:.0%")),
            ("computed", "r", "computed_tokens"),
            ("first token, s", "r", "ttft_cpu_s:.2f"),
            ("of prefix", "r", lambda row: "" if row["way"] == "all" else _cell(row, "over_prefix_cpu:.2f")),
            ("KL", "r", _not_exact(lambda row: "0" if float(row["kl"]) < 1e-7 else f"{float(row['kl']):.2g}")),
            ("same top", "r", _not_exact("same_top1:.1%")),
            ("answers", "r", _not_exact("{answers} of {prompts}")),
        ),
        "nowhere",
        order=lambda row: (
            int(row["size"]),
            list(WORKLOADS).index(row["workload"]),
            list(WAYS).index(row["way"]),
            row["recompute"],
        ),
    ),
    "determinism": Table(
        "determinism.csv",
        (
            ("way", "l", "way"),
            ("engine", "l", "engine"),
            ("type", "l", "dtype"),
            ("tokens cached", "r", "{cached_tokens} of {prompt_tokens}"),
            ("prompts with the same bits warm as cold", "r", "{same} of {prompts}"),
        ),
        "below",
        order=lambda row: (row["engine"], row["way"], row["dtype"]),
    ),
    "determinism_hits": Table(
        "determinism_hits.csv",
        (
            ("trace", "l", "trace"),
            ("prompts", "r", "prompts"),
            ("tokens of prompts", "r", "{prompt_tokens:,}"),
            ("hit", "r", over("hit_tokens", "prompt_tokens", ".3f")),
            ("hit in whole chunks", "r", over("chunk_hit_tokens", "prompt_tokens", ".3f")),
            ("of hits lost", "r", lambda row: f"{1 - int(row['chunk_hit_tokens']) / int(row['hit_tokens']):.3f}"),
        ),
        "below",
        packages=(),
    ),
    "determinism_time": Table(
        "determinism_time.csv",
        (
            ("call", "l", "call"),
            ("prompt", "r", "prompt_tokens"),
            ("chunk", "r", "chunk"),
            ("without, s", "r", "plain_s"),
            ("with, s", "r", "own_s"),
            ("ratio", "r", "over_plain:.2f"),
        ),
        "below",
        order=lambda row: (row["call"], int(row["chunk"])),
    ),
    "lookup_anywhere": Table(
        "lookup_anywhere.csv",
        (
            ("prompt", "r", "{tokens:,}"),
            ("cached elsewhere", "l", "found"),
            ("prefix, ms", "r", lambda row: f"{float(row['plain_us']) / 1000:.2f}"),
            ("anywhere, ms", "r", lambda row: f"{float(row['anywhere_us']) / 1000:.2f}"),
            ("ratio", "r", "over_plain:.2f"),
            ("whole request", "r", "request_over_plain:.2f"),
        ),
        "below",
    ),
}


def render_agents(page: Path) -> str:
    """Render the share of agents' prompts that is computed, by change (lines) and reuse (columns)."""
    source = results("cpu", "agents.csv")
    rows = read_rows(source)
    names = ("trace", "variant", "cache")
    lines = []
    for line in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        by_way = {row["way"]: row for row in rows if tuple(row[name] for name in names) == line}
        shares = [f"{int(row['computed_tokens']) / int(row['prompt_tokens']):.3f}" for row in by_way.values()]
        loss = by_way["anywhere"]
        kl = f"{float(loss['kl']):.2g} ({loss['sampled_prompts']})" if loss["kl"] else ""
        lines.append([*line, *shares, kl, loss["first_equal"]])
    heads = ("trace", "change", "cache", "prefix", "gap", "anywhere", "KL (prompts)", "first token equal")
    said = f"{rows[0]['device']}, {rows[0]['date']}, {commits(source, rows)}"
    return "\n".join([*table(heads, "lllrrrrr", lines), "", f"{said}; [rows]({link(page, source)})."])


def render_vllm_agents(page: Path) -> str:
    """Agents' prompts through vLLM's server, a line for each change of them and configuration."""
    source = results("cpu", "vllm_agents.csv")
    rows = read_rows(source)
    untouched = {
        (row["trace"], row["cache"]): int(row["computed_tokens"])
        for row in rows
        if (row["variant"], row["configuration"]) == ("untouched", "vllm")
    }
    lines = [
        [
            *(row[name] for name in ("trace", "variant", "cache", "configuration")),
            f"{int(row['prompt_tokens']):,}",
            f"{int(row['computed_tokens']):,}",
            f"{int(row['computed_tokens']) / untouched[row['trace'], row['cache']]:.2f}",
            f"{float(row['hit_rate']):.3f}",
            f"{float(row['ttft_p50']):.2f}",
            f"{float(row['ttft_p50_over_vllm']):.2f}",
            f"{float(row['kl']):.2g}" if row["kl"] else "",
            row["first_equal"],
        ]
        for row in rows
    ]
    heads = ("trace", "change", "cache", "engine", "tokens of prompts", "computed", "over untouched, vLLM", "hit rate")
    heads += ("first token, s", "over vLLM's", "KL", "first token equal")
    first = rows[0]
    cuts = dict.fromkeys(f"{row['sessions']} sessions and {row['turns']} turns of {row['trace']}" for row in rows)
    more = f"; {', '.join(cuts)}; {first['dtype']}, blocks of {first['block_size']} tokens"
    return "\n".join([*table(heads, "llll" + "r" * 8, lines), "", measured(page, source, rows, ("torch",), more)])


def render_replay(page: Path, trace: str) -> str:
    """Hit rates of a trace, a line for each policy and a column for each capacity."""
    source = results("cpu", f"replay_{trace}.csv")
    rows = read_rows(source)
    shares = sorted({float(row["capacity_share"]) for row in rows})
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        here = {float(row["capacity_share"]): row for row in rows if row["policy"] == policy}
        rates = (
            f"{float(here[s]['hit_rate']):.4f} ({float(here[s]['lru_ratio']):.2f})" if s in here else "" for s in shares
        )
        lines.append([policy, *rates])
    heads = ["policy", *(f"{share:.1%}" for share in shares)]
    return with_rows(table(heads, "l" * len(heads), lines), page, source)


def render_hint_ways(page: Path) -> str:
    """Blocks hit with and without hints, a line for each way a cut of a trace was served."""
    source = results("cpu", "hints.csv")
    rows = read_rows(source)
    columns = list(dict.fromkeys((row["policy"], row["hints"]) for row in rows))
    lines = []
    for way in dict.fromkeys(row["through"] for row in rows):
        hits = {(row["policy"], row["hints"]): row["hits"] for row in rows if row["through"] == way}
        lines.append([way, *(hits.get(column, "") for column in columns)])
    heads = [
        "blocks hit through",
        *(policy if hint == "none" else f"{policy}, hint {hint}" for policy, hint in columns),
    ]
    said = f"The first {int(rows[0]['requests']):,} requests of {rows[0]['trace']}, {rows[0]['blocks']} blocks."
    return with_rows([said, "", *table(heads, "l" + "r" * len(columns), lines)], page, source)


def render_hidden_states(page: Path) -> str:
    """Caching hidden states: ours beside the others, in one process."""
    source = results("cpu", "hidden_states.csv")
    rows = read_rows(source)
    others = [name for name in dict.fromkeys(row["provider"] for row in rows) if not name.startswith(OURS)]
    lines = []
    for tokens, features, what in dict.fromkeys((r["tokens"], r["features"], r["what"]) for r in rows):
        here = {r["provider"]: float(r["p50_us"]) for r in rows if (r["tokens"], r["what"]) == (tokens, what)}
        ours = next(value for name, value in here.items() if name.startswith(OURS))
        times = [short_time(ours), *(short_time(here[name]) for name in others)]
        lines.append([f"{int(tokens):,} x {int(features):,}", what, *times])
    heads = ("tokens x features", "what", "pc", *others)
    return "\n".join([measured(page, source, rows), "", *table(heads, "ll" + "r" * (1 + len(others)), lines)])


def render_anywhere_conditions(page: Path) -> str:
    """Model and machine."""
    source = results("cpu", "reuse_anywhere.csv")
    rows = read_rows(source)
    return f"{rows[0]['model']} in {rows[0]['dtype']}. {measured(page, source, rows, ('torch', 'transformers'))}"


def render_anywhere_chart(page: Path) -> str:
    """The chart of loss against time."""
    return f"![Loss against time to the first token]({chart(page, 'reuse_anywhere.svg')})"
