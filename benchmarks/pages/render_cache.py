"""Tables of what is cached: policies, the manager, hidden states, behind vLLM and vLLM-Omni too."""

from __future__ import annotations

from pathlib import Path

from ..harness.registry import OURS
from ..harness.tables import read_rows
from .markdown import commits, measured, results, table, with_rows
from .plots import short_time


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


def render_hints(page: Path, trace: str) -> str:
    """Hit rates of a trace at one capacity by what policies were told."""
    source = results("cpu", f"replay_{trace}.csv")
    lines = [
        (row["policy"], row["hints"], f"{float(row['hit_rate']):.4f}", f"{float(row['lru_ratio']):.2f}")
        for row in read_rows(source)
    ]
    return with_rows(table(("policy", "told", "hits", "to lru"), "llrr", lines), page, source)


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
        *(policy if told == "none" else f"{policy}, told {told}" for policy, told in columns),
    ]
    said = f"The first {int(rows[0]['requests']):,} requests of {rows[0]['trace']}, {rows[0]['blocks']} blocks."
    return with_rows([said, "", *table(heads, "l" + "r" * len(columns), lines)], page, source)


def render_traffic(page: Path) -> str:
    """Hit rates where traffic changes, and the worst windows."""
    source = results("cpu", "traffic.csv")
    lines = [
        (
            row["traffic"],
            row["capacity_share"],
            f"{float(row['lru']):.4f}",
            row["policy"],
            f"{float(row['hit_rate']):.4f}",
            f"{float(row['ratio']):.3f}",
            f"{float(row['worst_window']):.2f} of {int(row['window']):,} requests",
        )
        for row in read_rows(source)
    ]
    heads = ("traffic", "capacity", "lru", "policy", "hits", "to lru", "worst window")
    return with_rows(table(heads, "lrrlrrr", lines), page, source)


def render_manager(page: Path) -> str:
    """Microseconds a request of the manager and of its peers."""
    source = results("cpu", "manager.csv")
    rows = read_rows(source)
    lines = [
        (r["peer"], r["hash"], r["tokens"], r["pc_us"], r["peer_us"], f"{float(r['pc_over_peer']):.2f}") for r in rows
    ]
    heads = ("peer", "hash", "tokens", "pc, us", "peer, us", "pc / peer")
    said = f"{rows[0]['cores']} cores, Python {rows[0]['python']}, {rows[0]['date']}, {commits(source, rows)}. "
    return with_rows(table(heads, "llrrrr", lines), page, source, said)


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


def render_omni(page: Path) -> str:
    """Steps behind vLLM-Omni's calls, CPU time of its manager and of ours."""
    source = results("cpu", "vllm_omni.csv")
    rows = read_rows(source)
    lines = []
    for row in rows:
        ours, theirs = float(row["pc_us"]), float(row["peer_us"])
        case = [f"{int(row['tokens']):,} x {int(row['features']):,}", row["what"], row["call"]]
        lines.append([*case, short_time(ours), short_time(theirs), f"{theirs / ours:.1f}"])
    heads = ("tokens x features", "step", "call", "pc", "vLLM-Omni", "vLLM-Omni / pc")
    said = measured(page, source, rows, more=f", {rows[0]['peer']}")
    return "\n".join([said, "", *table(heads, "lllrrr", lines)])


def render_scheduler(page: Path) -> str:
    """Hit rates behind vLLM's scheduler, and CPU time of its steps."""
    source = results("cpu", "vllm_scheduler.csv")
    rows = read_rows(source)
    first = rows[0]
    lines = []
    for row in rows:
        times = [short_time(float(row["step_us"])), f"{float(row['over_vllm']):.2f}"]
        lines.append([row["policy"], row["hit_rate"], row["replay_hit_rate"], *times])
    heads = ("policy", "hit rate", "of `pc replay`", "CPU time of a step", "over vLLM's own queue")
    blocks = (
        f"; {first['trace']}, {int(first['blocks']):,} blocks, {first['steps']} steps of {first['requests']} requests"
    )
    return "\n".join([measured(page, source, rows, (), blocks), "", *table(heads, "lrrrr", lines)])


def render_vllm_tier(page: Path) -> str:
    """Hit rates in vLLM's tier in host memory, and CPU time of its manager."""
    source = results("cpu", "vllm_tier.csv")
    rows = read_rows(source)
    names = {"vllm": "vLLM's `lru`", "arc": "vLLM's `arc`"}
    lines = [
        [
            f"{float(row['share']):.0%}",
            names.get(row["policy"], f"`{row['policy']}`"),
            row["hit_rate"],
            short_time(float(row["request_us"])),
            f"{float(row['over_vllm']):.2f}",
        ]
        for row in rows
    ]
    heads = ("of the trace's blocks", "policy", "hit rate", "CPU time of a request", "over vLLM's `lru`")
    said = measured(page, source, rows, (), f"; {rows[0]['trace']}, {int(rows[0]['requests']):,} requests")
    return "\n".join([said, "", *table(heads, "llrrr", lines)])


def render_serving(page: Path) -> str:
    """Hit rates and times to the first token through vLLM's server."""
    source = results("cpu", "vllm_serving.csv")
    rows = read_rows(source)
    lines = []
    for row in rows:
        rates = [f"{float(row[name]):.3f}" for name in ("hit_rate", "replay_hit_rate")]
        times = [
            f"{float(row[name]):.2f}" for name in ("ttft_p50_over_vllm", "ttft_p90_over_vllm", "seconds_over_vllm")
        ]
        lines.append([row["workload"], row["configuration"], *rates, *times])
    first = rows[0]
    said = (
        f"; {first['requests']} requests of {first['clients']} clients, {int(first['prompt_tokens']):,} tokens of "
        f"prompts, {first['running']} at once in {first['blocks']} blocks of {first['block_size']} tokens, "
        f"{first['rounds']} rounds; vLLM's own times to the first token are {float(first['ttft_p50']):.1f} s (median) "
        f"and {float(first['ttft_p90']):.1f} s (90th percentile)"
    )
    heads = (
        "requests",
        "eviction",
        "hit rate",
        "of `pc replay`",
        "first token, median",
        "90th percentile",
        "all requests",
    )
    return "\n".join([measured(page, source, rows, (), said), "", *table(heads, "llrrrrr", lines)])


def render_vllm_cpu(page: Path) -> str:
    """Time of vLLM's steps on a CPU with our attention backend, over its own."""
    source = results("cpu", "vllm_cpu.csv")
    rows = read_rows(source)
    lines = []
    for row in rows:
        times = [short_time(float(row[name]) * 1e3) for name in ("vllm_ms", "pc_ms")]
        lines.append([row["step"], row["batch"], row["context"], *times, f"{float(row['over_vllm']):.2f}"])
    heads = ("step", "requests", "tokens of each", "vLLM's backend", "ours", "ours over vLLM's")
    said = f"; SmolLM2-135M, float32, medians of {rows[0]['rounds']} rounds"
    return "\n".join([measured(page, source, rows, more=said), "", *table(heads, "lrrrrr", lines)])


def render_sglang_radix(page: Path) -> str:
    """Hit rates in SGLang's radix cache, and CPU time of its calls."""
    source = results("cpu", "sglang_radix.csv")
    rows = read_rows(source)
    first = rows[0]
    lines = []
    for row in rows:
        times = [
            short_time(float(row["request_us"])),
            f"{float(row['over_rust']):.2f}",
            f"{float(row['over_python']):.2f}",
        ]
        lines.append([row["policy"], row["core"], row["hit_rate"], row["replay_hit_rate"], *times])
    heads = (
        "policy",
        "core",
        "hit rate",
        "of `pc replay`",
        "CPU time of a request",
        "over lru in Rust",
        "over lru in Python",
    )
    pages = f"; {first['trace']}, {int(first['pages']):,} pages; timed: {first['requests']} requests"
    pages += f" in {int(first['timed_pages']):,} pages"
    return "\n".join([measured(page, source, rows, (), pages), "", *table(heads, "llrrrrr", lines)])
