"""Renders the numbers and charts of README and docs from the rows in the tree: `python benchmarks/render_docs.py`.

A page says where with `<!-- render: name arguments -->` and `<!-- /render -->`; what is between is replaced. A test
renders again and compares, and refuses a measurement that stands anywhere else.
"""

from __future__ import annotations

import importlib
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    from pc.bench import PACKAGE, load_benchmarks

    load_benchmarks()
    sys.exit(importlib.import_module(f"{PACKAGE}.render_docs").main())

from .plots import digest, drawn_from, plot_demo, plot_operator, plot_reuse, plot_work, short_time
from .registry import OURS, ROOT, operators
from .tables import Row, read_rows

RESULTS = ROOT / "benchmarks" / "results"
CHARTS = ROOT / "docs" / "images"
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


def _link(page: Path, target: Path) -> str:
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    return up + target.relative_to(ROOT).as_posix()


def _chart(page: Path, name: str) -> str:
    path = CHARTS / name
    if page.parent in path.parents:
        return path.relative_to(page.parent).as_posix()
    if ROOT / "docs" in page.parents:
        return "../" * (len(page.relative_to(ROOT / "docs").parts) - 1) + f"images/{name}"
    return _link(page, path)


def devices() -> list[str]:
    """Folders of results, the CPU's last."""
    found = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
    return [name for name in found if name != "cpu"] + [name for name in found if name == "cpu"]


def render_operator(page: Path, op: str, device: str = "") -> str:
    """Table and chart of an operator, on one device or on all that have rows."""
    parts = []
    for name in [device] if device else devices():
        source = RESULTS / name / f"{op}.csv"
        rows = read_rows(source)
        if not rows:
            continue
        first = rows[0]
        commits = ", ".join(sorted({row["commit"] for row in rows}))
        parts += [
            f"![{op} and its rivals on {first['device']}]({_chart(page, f'{op}-{name}.svg')})",
            "",
            f"{first['device']}, torch {first['torch']}, {first['date']}, commit {commits}; "
            f"[rows]({_link(page, source)}).",
            "",
            *_table(rows),
            "",
        ]
    if not parts:
        return "No measurement of this operator is in the tree yet."
    if not any(name != "cpu" and (RESULTS / name / f"{op}.csv").exists() for name in devices()):
        parts.append("Not measured on a GPU yet. On CPU tensors it is PyTorch that runs, not the kernel.")
    return "\n".join(parts).rstrip()


def _table(rows: list[Row]) -> list[str]:
    lines = [
        "| case | pc | of the roofline | best rival | rival / pc |",
        "|---|--:|--:|---|--:|",
    ]
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    for case in dict.fromkeys(row["case"] for row in rows):
        timed = [row for row in rows if row["case"] == case and row["mode"] == mode and row.get("p50_us")]
        ours = next((row for row in timed if row["provider"] == OURS), None)
        rivals = [row for row in timed if not row["provider"].startswith(OURS)]
        if ours is None:
            continue
        best = min(rivals, key=lambda row: float(row["p50_us"]), default=None)
        cells = [case, short_time(float(ours["p50_us"])), f"{float(ours['roofline']):.0%}"]
        if best is None:
            cells += ["", ""]
        else:
            ratio = float(best["p50_us"]) / float(ours["p50_us"])
            cells += [f"{best['provider']}, {short_time(float(best['p50_us']))}", f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def render_operators(page: Path, device: str) -> str:
    """One table of all operators that have rows on a device; charts are on the operators' pages."""
    sources = {op: RESULTS / device / f"{op}.csv" for op in operators()}
    tables = {op: _table(rows) for op, source in sources.items() if (rows := read_rows(source))}
    if not tables:
        return "No measurement is in the tree yet."
    rows = [row for op in tables for row in read_rows(sources[op])]
    commits, dates = (", ".join(sorted({row[name] for row in rows})) for name in ("commit", "date"))
    # The last cell is the best rival's time over ours; empty where there is no rival.
    ratios = [float(cell) for body in tables.values() for line in body[2:] if (cell := line.split("|")[-2].strip())]
    won = sum(ratio >= 1 for ratio in ratios)
    lines = [
        f"{rows[0]['device']}, torch {rows[0]['torch']}, {dates}, commit {commits}. "
        f"pc is the fastest in {won} of {len(ratios)} cases that have a rival; below 1.00 in the last column it loses.",
        "",
        "| operator " + next(iter(tables.values()))[0],
        "|---" + next(iter(tables.values()))[1],
    ]
    for op, (_, _, *body) in tables.items():
        described = ROOT / "docs" / "ops" / f"{op}.md"
        target = f"ops/{op}.md" if described.exists() and page.parent == ROOT / "docs" else _link(page, sources[op])
        name = f"[{op}]({target})"
        lines += [f"| {name} {line}" for line in body]
    return "\n".join(lines)


def render_gpu(page: Path) -> str:
    """Tables of every GPU that was measured, or plainly what is missing."""
    measured = [name for name in devices() if name != "cpu"]
    if measured:
        return "\n\n".join(f"{render_operators(page, name)}\n\n{_generate(page, name)}".rstrip() for name in measured)
    return (
        "**Missing.** No GPU has been measured yet, so nothing here says how fast the kernels are: no time of an "
        "operator, no fraction of the roofline, no comparison with FlashInfer, flash-attn-4, vLLM or FlexAttention, no "
        "generation on a GPU. `make gpu` measures all of it and writes the rows that this section is rendered from."
    )


def _generate(page: Path, device: str) -> str:
    """Generation with a model of a billion parameters, medians from the second request on."""
    source = RESULTS / device / "generate.csv"
    rows = [row for row in read_rows(source) if row["request"] not in ("", "1")]
    if not rows:
        return "Generation has not been measured here yet."
    first = rows[0]
    lines = [
        "### generate",
        "",
        f"{first['model']}, {first['dtype']}, prompts of {first['prompt_tokens']} tokens, all but the last few shared, "
        f"{first['device']}, {first['date']}, commit {first['commit']}; [rows]({_link(page, source)}).",
        "",
        "| way | first token | tokens a second after it | same tokens |",
        "|---|--:|--:|---|",
    ]
    for way in dict.fromkeys(row["way"] for row in rows):
        chosen = [row for row in rows if row["way"] == way]
        seconds, rate = (statistics.median(float(row[c]) for row in chosen) for c in ("first_token_s", "tokens_per_s"))
        same = "yes" if all(row["same_as_transformers"] == "True" for row in chosen) else "no"
        lines.append(f"| {way} | {short_time(seconds * 1e6)} | {rate:.1f} | {same} |")
    return "\n".join(lines)


def _demo() -> list[Row]:
    return read_rows(RESULTS / "cpu" / "demo.csv")


def _later(workload: str) -> float:
    return statistics.median(float(r["ratio"]) for r in _demo() if r["workload"] == workload and r["request"] != "1")


def render_demo_conditions(page: Path) -> str:
    """A sentence on the demo's result."""
    rows = _demo()
    tokens = [int(row["prompt_tokens"]) for row in rows if row["workload"] == "document"]
    same = "Every token is the same as without the cache" if all(r["same"] == "yes" for r in rows) else "Tokens differ"
    return (
        f"questions about a document of {min(tokens):,} tokens get their first token {_later('document'):.0f} times "
        f"sooner from the second on, rounds of a conversation {_later('conversation'):.1f} times (medians; "
        f"{rows[0]['dtype']}, {rows[0]['model']}, {rows[0]['threads']} threads, torch {rows[0]['torch']}). {same}; "
        f"[rows]({_link(page, RESULTS / 'cpu' / 'demo.csv')})."
    )


def render_demo_table(page: Path) -> str:
    """The demo's requests."""
    lines = [
        "| workload | request | prompt tokens | reused | first token without | with pc | ratio | same tokens |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in _demo():
        plain, cached = (short_time(float(row[name]) * 1e6) for name in ("ttft_plain_s", "ttft_cached_s"))
        lines.append(
            f"| {row['workload']} | {row['request']} | {int(row['prompt_tokens']):,} | {int(row['reused_tokens']):,} | "
            f"{plain} | {cached} | {float(row['ratio']):.1f} | {row['same']} |"
        )
    return "\n".join(lines)


def render_replay(page: Path, trace: str) -> str:
    """Hit rates of a trace, a line for each policy and a column for each capacity."""
    source = RESULTS / "cpu" / f"replay_{trace}.csv"
    rows = read_rows(source)
    shares = sorted({float(row["capacity_share"]) for row in rows})
    lines = ["| policy | " + " | ".join(f"{share:.1%}" for share in shares) + " |", "|---" * (len(shares) + 1) + "|"]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = {float(row["capacity_share"]): row for row in rows if row["policy"] == policy}
        texts = [
            f"{float(cells[s]['hit_rate']):.4f} ({float(cells[s]['lru_ratio']):.2f})" if s in cells else ""
            for s in shares
        ]
        lines.append(f"| {policy} | " + " | ".join(texts) + " |")
    return "\n".join([*lines, "", f"[Rows]({_link(page, source)})"])


def render_hints(page: Path, trace: str) -> str:
    """Hit rates of a trace at one capacity by what policies were told."""
    source = RESULTS / "cpu" / f"replay_{trace}.csv"
    lines = ["| policy | told | hits | to lru |", "|---|---|--:|--:|"]
    for row in read_rows(source):
        rates = f"{float(row['hit_rate']):.4f} | {float(row['lru_ratio']):.2f}"
        lines.append(f"| {row['policy']} | {row['hints']} | {rates} |")
    return "\n".join([*lines, "", f"[Rows]({_link(page, source)})"])


def render_hint_ways(page: Path) -> str:
    """Blocks hit with and without hints, a line for each way a cut of a trace was served."""
    source = RESULTS / "cpu" / "hints.csv"
    rows = read_rows(source)
    columns = list(dict.fromkeys((row["policy"], row["hints"]) for row in rows))
    heads = [policy if told == "none" else f"{policy}, told {told}" for policy, told in columns]
    lines = [
        f"The first {int(rows[0]['requests']):,} requests of {rows[0]['trace']}, {rows[0]['blocks']} blocks.",
        "",
        "| blocks hit through | " + " | ".join(heads) + " |",
        "|---" + "|--:" * len(heads) + "|",
    ]
    for way in dict.fromkeys(row["through"] for row in rows):
        hits = {(row["policy"], row["hints"]): row["hits"] for row in rows if row["through"] == way}
        lines.append(f"| {way} | " + " | ".join(hits.get(column, "") for column in columns) + " |")
    return "\n".join([*lines, "", f"[Rows]({_link(page, source)})"])


def render_traffic(page: Path) -> str:
    """Hit rates where traffic changes, and the worst windows."""
    source = RESULTS / "cpu" / "traffic.csv"
    lines = ["| traffic | capacity | lru | policy | hits | to lru | worst window |", "|---|--:|--:|---|--:|--:|--:|"]
    for row in read_rows(source):
        rates = f"{float(row['lru']):.4f} | {row['policy']} | {float(row['hit_rate']):.4f} | {float(row['ratio']):.3f}"
        worst = f"{float(row['worst_window']):.2f} of {int(row['window']):,} requests"
        lines.append(f"| {row['traffic']} | {row['capacity_share']} | {rates} | {worst} |")
    return "\n".join([*lines, "", f"[Rows]({_link(page, source)})"])


def render_manager(page: Path) -> str:
    """Microseconds a request of the manager and of its peers."""
    source = RESULTS / "cpu" / "manager.csv"
    rows = read_rows(source)
    lines = ["| peer | hash | tokens | pc, us | peer, us | pc / peer |", "|---|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row['peer']} | {row['hash']} | {row['tokens']} | {row['pc_us']} | {row['peer_us']} | "
        f"{float(row['pc_over_peer']):.2f} |"
        for row in rows
    ]
    lines += [
        "",
        f"{rows[0]['cores']} cores, Python {rows[0]['python']}, {rows[0]['date']}. [Rows]({_link(page, source)})",
    ]
    return "\n".join(lines)


def render_hidden_states(page: Path) -> str:
    """Caching hidden states: ours beside the others, in one process."""
    source = RESULTS / "cpu" / "hidden_states.csv"
    rows = read_rows(source)
    others = [name for name in dict.fromkeys(row["provider"] for row in rows) if not name.startswith(OURS)]
    first = rows[0]
    lines = [
        f"{first['device']}, torch {first['torch']}, {first['date']}, commit {first['commit']}; "
        f"[rows]({_link(page, source)}).",
        "",
        f"| tokens x features | what | pc | {' | '.join(others)} |",
        f"|---|---|{'--:|' * (1 + len(others))}",
    ]
    for tokens, features, what in dict.fromkeys((r["tokens"], r["features"], r["what"]) for r in rows):
        here = {r["provider"]: float(r["p50_us"]) for r in rows if (r["tokens"], r["what"]) == (tokens, what)}
        ours = next(value for name, value in here.items() if name.startswith(OURS))
        cells = [short_time(ours), *(short_time(here[name]) for name in others)]
        lines.append(f"| {int(tokens):,} x {int(features):,} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render_reuse(page: Path) -> str:
    """Generate over the cache beside plain generate and caches kept by hand, in CPU time."""
    source = RESULTS / "cpu" / "reuse.csv"
    rows = read_rows(source)
    if not rows:
        return "Not measured yet: `python -m benchmarks.reuse`."
    first, commits = rows[0], ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        f"![CPU time over that of plain generate]({_chart(page, 'reuse.svg')})",
        "",
        f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}, {first['date']}, "
        f"commit {commits}; [rows]({_link(page, source)}). In brackets: over plain.",
        "",
        "| model | prompt | way | first token | 64 tokens | 256 tokens | a token | peak memory |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [row["model"].split(",")[0], f"{int(row['prompt_tokens']):,}"]
        cells.append(row["way"] if row["call"] == "warm" else f"{row['way']}, all new")
        for column in ("s_1", "s_64", "s_256", "decode_s"):
            known = row[column] and f"{short_time(float(row[column]) * 1e6)} ({float(row[column + '_over_plain']):.2f})"
            cells.append(known)
        memory = f"{int(row['peak_bytes']) / 2**20:.0f} MiB"
        lines.append(f"| {' | '.join([*cells, memory])} |")
    return "\n".join(lines)


def render_omni(page: Path) -> str:
    """Steps behind vLLM-Omni's calls, CPU time of its manager and of ours."""
    source = RESULTS / "cpu" / "vllm_omni.csv"
    rows = read_rows(source)
    first = rows[0]
    lines = [
        f"{first['device']}, torch {first['torch']}, {first['date']}, commit {first['commit']}, {first['peer']}; "
        f"[rows]({_link(page, source)}).",
        "",
        "| tokens x features | step | call | pc | vLLM-Omni | vLLM-Omni / pc |",
        "|---|---|---|--:|--:|--:|",
    ]
    for row in rows:
        ours, theirs = float(row["pc_us"]), float(row["peer_us"])
        case = f"{int(row['tokens']):,} x {int(row['features']):,} | {row['what']} | {row['call']}"
        lines.append(f"| {case} | {short_time(ours)} | {short_time(theirs)} | {theirs / ours:.1f} |")
    return "\n".join(lines)


def render_batching(page: Path) -> str:
    """CPU time of generate_batch calls, ours and transformers' own."""
    source = RESULTS / "cpu" / "batching.csv"
    rows = read_rows(source)
    first = rows[0]
    others = [way for way in dict.fromkeys(row["way"] for row in rows) if way != OURS]
    lines = [
        f"{first['requests']} prompts in a call, {first['new_tokens']} new tokens each; shared, again: about one "
        f"document of {first['document']} tokens, {first['own']} of their own; "
        f"own: {int(first['document']) // 4} of their own. "
        f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}, {first['date']}, commit "
        f"{first['commit']}; [rows]({_link(page, source)}).",
        "",
        f"| model | prompts | pc | {' | '.join(others)} | best of theirs / pc | tokens found | same tokens |",
        f"|---|---|{'--:|' * (3 + len(others))}---|",
    ]
    for model, work in dict.fromkeys((row["model"], row["workload"]) for row in rows):
        here = {row["way"]: row for row in rows if (row["model"], row["workload"]) == (model, work)}
        times = {way: float(row["cpu_s"]) for way, row in here.items()}
        cells = [model, work, *(short_time(times[way] * 1e6) for way in (OURS, *others))]
        cells += [f"{min(times[way] for way in others) / times[OURS]:.2f}", here[OURS]["hit_tokens"]]
        same = "yes" if all(row["same_tokens"] == "True" for row in here.values()) else "no"
        lines.append(f"| {' | '.join(cells)} | {same} |")
    return "\n".join(lines)


def render_scheduler(page: Path) -> str:
    """Hit rates behind vLLM's scheduler, and CPU time of its steps."""
    source = RESULTS / "cpu" / "vllm_scheduler.csv"
    rows = read_rows(source)
    first = rows[0]
    lines = [
        f"{first['device']}, {first['date']}, commit {first['commit']}; {first['trace']}, {int(first['blocks']):,} "
        f"blocks, {first['steps']} steps of {first['requests']} requests; [rows]({_link(page, source)}).",
        "",
        "| policy | hit rate | of `pc replay` | CPU time of a step | over vLLM's own queue |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        took = short_time(float(row["step_us"]))
        hits = f"{row['policy']} | {row['hit_rate']} | {row['replay_hit_rate']}"
        lines.append(f"| {hits} | {took} | {float(row['over_vllm']):.2f} |")
    return "\n".join(lines)


def render_work(page: Path) -> str:
    """Work of attention steps, counted on compiled kernels, beside vLLM's."""
    source = RESULTS / "work.csv"
    rows = read_rows(source)
    if not rows:
        return "Not counted yet: `make work`."
    first, version = rows[0], next(row["version"] for row in rows if row["version"])
    head = "step | target | warp instructions, pc | vLLM | vLLM / pc | MB read, pc | vLLM | MB written, pc | vLLM"
    lines = [
        f"![Warp instructions of attention steps, ours and vLLM's]({_chart(page, 'work.svg')})",
        "",
        f"triton {first['triton']}, {first['date']}, commit {first['commit']}, vLLM {version}; "
        f"[rows, with instructions by kind]({_link(page, source)}).",
        "",
        f"| {head} | launches |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for arch, case in dict.fromkeys((row["architecture"], row["case"]) for row in rows):
        ours, theirs = (
            next(r for r in rows if (r["architecture"], r["case"]) == (arch, case) and (r["provider"] == OURS) == own)
            for own in (True, False)
        )
        count = [int(row["instructions"]) for row in (ours, theirs)]
        cells = [f"{count[0]:,}", f"{count[1]:,}", f"{count[1] / count[0]:.2f}"]
        for name in ("loaded_bytes", "stored_bytes"):
            cells += [f"{int(row[name]) / 1e6:.2f}" for row in (ours, theirs)]
        lines.append(f"| {case} | {arch} | {' | '.join(cells)} | {ours['launches']}, {theirs['launches']} |")
    return "\n".join(lines)


KINDS = {
    "full attention": "Llama Qwen2 Qwen3 Qwen3Moe Mixtral Phi3 Olmo2 Glm4 Glm4Moe Granite SmolLM3 GPT2 Bloom Falcon",
    "windows, chunks, sinks": "Mistral Gemma2 Gemma3 Gemma3n Gemma4 GptOss Llama4 Cohere2 Olmo3 Exaone4",
    "latent attention": "DeepseekV2 DeepseekV3 Mistral4 MiniCPM3 Glm4MoeLite LongcatFlash",
    "recurrent states": "Qwen3Next Qwen3_5 NemotronH GraniteMoeHybrid FalconH1 Lfm2 OlmoHybrid KimiLinear Mamba2",
    "vision-language": "Gemma3 Gemma4 Llava LlavaNext LlavaOnevision Qwen2VL Qwen2_5_VL Qwen3VL Qwen3_5 Llama4 Glm4v "
    "InternVL Idefics3 SmolVLM",
    "handed back": "Mamba FalconMamba RecurrentGemma DeepseekV32 Mpt",
}
"""Families that a newcomer looks for; README shows those of them that `pc families` found so."""


def render_families(page: Path) -> str:
    """A line for each kind of model, from the table of every class in docs/huggingface.md."""
    source = ROOT / "docs" / "huggingface.md"
    table = re.findall(r"^\| (\w+) \| (served|handed back) \|", source.read_text(encoding="utf-8"), re.MULTILINE)
    lines = ["| models | families, of those that were run |", "|---|---|"]
    for kind, names in KINDS.items():
        outcome = "handed back" if kind == "handed back" else "served"
        suffixes = ("ForConditionalGeneration",) if kind == "vision-language" else ("ForCausalLM", "LMHeadModel")
        found = {
            name.removesuffix(end) for name, was in table if was == outcome for end in suffixes if name.endswith(end)
        }
        lines.append(f"| {kind} | {', '.join(name for name in names.split() if name in found)} |")
    served = sum(was == "served" for _, was in table)
    return "\n".join(
        [*lines, "", f"{served} classes of transformers are served: [every one]({_link(page, source)}#families)."]
    )


RENDERERS: dict[str, Callable[..., str]] = {
    "work": render_work,
    "families": render_families,
    "operator": render_operator,
    "operators": render_operators,
    "gpu": render_gpu,
    "demo_conditions": render_demo_conditions,
    "demo_table": render_demo_table,
    "hidden_states": render_hidden_states,
    "omni": render_omni,
    "reuse": render_reuse,
    "scheduler": render_scheduler,
    "replay": render_replay,
    "hints": render_hints,
    "hint_ways": render_hint_ways,
    "traffic": render_traffic,
    "manager": render_manager,
    "batching": render_batching,
}


def charts() -> dict[Path, tuple[Path, Callable[[Path, Path], None]]]:
    """Every chart, with the rows it is drawn from and what draws it."""
    found: dict[Path, tuple[Path, Callable[[Path, Path], None]]] = {}
    for device in devices():
        for op in operators():
            if (RESULTS / device / f"{op}.csv").exists():
                found[CHARTS / f"{op}-{device}.svg"] = (RESULTS / device / f"{op}.csv", plot_operator)
    if read_rows(RESULTS / "work.csv"):
        found[CHARTS / "work.svg"] = (RESULTS / "work.csv", plot_work)
    if read_rows(RESULTS / "cpu" / "reuse.csv"):
        found[CHARTS / "reuse.svg"] = (RESULTS / "cpu" / "reuse.csv", plot_reuse)
    if _demo():
        found[CHARTS / "demo.svg"] = (RESULTS / "cpu" / "demo.csv", plot_demo)
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
