"""Tables of pages as data: a file of rows, the columns, and the text around them."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..harness.registry import OURS
from ..harness.tables import Row, number, read_rows
from .markdown import chart, commits, measured, results, short_time, table, with_rows

WORKLOADS = {
    "order": "five documents, six orders",
    "agent": "an agent drops results",
    "edit": "an edit in the middle",
}
WAYS = {"all": "everything computed", "prefix": "prefix caching", "anywhere": "anywhere"}
COMPRESSED_REQUESTS = {"prompt": "the whole prompt", "document": "the document, before its questions"}
TIERS = {"vllm": "vLLM's `lru`", "arc": "vLLM's `arc`"}

Cell = str | Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """A table of a file's rows.

    Attributes:
        source: Name of the file below the CPU's results; "{}" is replaced by the page's argument.
        columns: For each column its head, its side (l or r) and its cells: a column of the file, with a format if it is
            a number ("ratio:.2f"); a text with columns ("{hits:,} of {tokens:,}"); or a function of the row.
        said: Place of the conditions: "above" or "below" the table, "rows" for a link to the rows alone, or "nowhere".
        more: Text behind the conditions, or before the link, with columns of the first row and `commits`.
        packages: Distributions whose versions the conditions name.
        order: Sort key of rows; None keeps the file's order.
        beside: Columns that identify a line, and a column whose values tell a line's rows apart. The line then has the
            columns of its first row, and those of each row as "value.column". None: a line for each row.
    """

    source: str
    columns: tuple[tuple[str, str, Cell], ...]
    said: str = "rows"
    more: str = ""
    packages: tuple[str, ...] = ("torch",)
    order: Callable[[Row], object] | None = None
    beside: tuple[tuple[str, ...], str] | None = None

    def render(self, page: Path, *arguments: str) -> str:
        """Return the table with its conditions."""
        source = results("cpu", self.source.format(*arguments))
        rows = read_rows(source)
        if self.order is not None:
            rows.sort(key=self.order)  # type: ignore[arg-type]
        heads, sides, cells = zip(*self.columns, strict=True)
        found = rows if self.beside is None else _beside(rows, *self.beside)
        lines = table(heads, "".join(sides), [[_cell(row, cell) for cell in cells] for row in found])
        more = _Filling().vformat(self.more, (), rows[0] | {"commits": commits(source, rows)}) if self.more else ""
        if self.said == "rows":
            return with_rows(lines, page, source, more)
        conditions = "" if self.said == "nowhere" else measured(page, source, rows, self.packages, more)
        parts = {"above": [conditions, "", *lines], "below": [*lines, "", conditions], "nowhere": lines}
        return "\n".join(parts[self.said])


def _beside(rows: list[Row], names: tuple[str, ...], column: str) -> list[Row]:
    """Return one line for all rows with the same values in the columns `names`."""
    lines: dict[tuple[str, ...], Row] = {}
    for row in rows:
        line = lines.setdefault(tuple(row[name] for name in names), dict(row))
        line |= {f"{row[column]}.{name}": value for name, value in row.items()}
    return list(lines.values())


def _cell(row: Row, cell: Cell) -> str:
    if callable(cell):
        return cell(row)
    if "{" in cell:
        return _Filling().vformat(cell, (), row)
    name, _, form = cell.partition(":")
    return format(float(row[name]), form) if form else row[name]


class _Filling(string.Formatter):
    """A formatter that puts columns into a text as they are, or as numbers if they have a format."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs[field_name], field_name  # "pc.hits" is a column too

    def format_field(self, value: str, spec: str) -> str:
        return format(number(value), spec) if spec else value


def time(column: str, microseconds: float = 1) -> Callable[[Row], str]:
    """Return cells with a time from a column in units of so many microseconds."""
    return lambda row: short_time(float(row[column]) * microseconds)


def over(one: str, other: str, form: str) -> Callable[[Row], str]:
    """Return cells with one column divided by another."""
    return lambda row: format(float(row[one]) / float(row[other]), form)


def _not_exact(form: Cell) -> Callable[[Row], str]:
    """Return cells that only ways with a loss have."""
    return lambda row: _cell(row, form) if row["way"] == "anywhere" else ""


def _share(way: str) -> Callable[[Row], str]:
    """Return cells with the share of prompt tokens that a way computes."""
    return over(f"{way}.computed_tokens", f"{way}.prompt_tokens", ".3f")


def _loss(row: Row) -> str:
    kl = row["anywhere.kl"]
    return f"{float(kl):.2g} ({row['anywhere.sampled_prompts']})" if kl else ""


PLAIN_CACHES = ("plain copy", "copy per block", "indexing", "index_copy_, index_select", "vllm-omni")

TABLES = {
    "agents": Table(
        "agents.csv",
        (
            ("trace", "l", "trace"),
            ("change", "l", "variant"),
            ("cache", "l", "cache"),
            *((way, "r", _share(way)) for way in ("prefix", "gap", "anywhere")),
            ("KL (prompts)", "r", _loss),
            ("first token equal", "r", "anywhere.first_equal"),
        ),
        "below",
        packages=(),
        beside=(("trace", "variant", "cache"), "way"),
    ),
    "hidden_states": Table(
        "hidden_states.csv",
        (
            ("tokens x features", "l", "{tokens:,} x {features:,}"),
            ("what", "l", "what"),
            *((name, "r", time(f"{name}.p50_us")) for name in (OURS, *PLAIN_CACHES)),
        ),
        "above",
        beside=(("tokens", "features", "what"), "provider"),
    ),
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
    "vllm_compression": Table(
        "vllm_compression.csv",
        (
            ("compressed", "l", lambda row: COMPRESSED_REQUESTS[row["requests_of"]]),
            ("budget", "r", "budget:.0%"),
            ("right answers", "r", "{right} of {requests}"),
            ("steps", "r", "{steps:,}"),
            ("tokens computed", "r", "{tokens:,}"),
            ("preemptions", "r", "preemptions"),
            ("requests a minute, over 100%", "r", "rate_over_exact:.2f"),
            ("time to first token, over 100%", "r", "first_token_over_exact:.2f"),
        ),
        "above",
        "; {blocks} blocks of {block_size} tokens, prompts of {prompt_tokens:,}; meanwhile {other_load}",
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


def render_anywhere_conditions(page: Path) -> str:
    """Model and machine."""
    source = results("cpu", "reuse_anywhere.csv")
    rows = read_rows(source)
    return f"{rows[0]['model']} in {rows[0]['dtype']}. {measured(page, source, rows, ('torch', 'transformers'))}"


def render_anywhere_chart(page: Path) -> str:
    """The chart of loss against time."""
    return f"![Loss against time to the first token]({chart(page, 'reuse_anywhere.svg')})"
