"""Tables of operators, of generation on GPUs, and of counted work."""

from __future__ import annotations

import statistics
from pathlib import Path

from ..gpu import STEPS
from ..harness.registry import OURS, ROOT, operators
from ..harness.tables import RESULTS, Row, read_rows
from .markdown import (
    all_of,
    chart,
    commits,
    devices,
    link,
    measured,
    newest_triton,
    short_time,
    table,
    with_rows,
)
from .tables import beside

HEADS = ("case", "pc", "of the roofline", "best rival", "rival / pc")
SIDES = "lrrlr"


def render_operator(page: Path, op: str, device: str = "") -> str:
    """Render table and chart of an operator, on one device or on all that have rows."""
    parts = []
    for name in [device] if device else devices():
        source = RESULTS / name / f"{op}.csv"
        rows = read_rows(source)
        if not rows:
            continue
        parts += [
            f"![{op} and its rivals on {rows[0]['device']}]({chart(page, f'{op}-{name}.svg')})",
            "",
            measured(page, source, rows),
            "",
            *table(HEADS, SIDES, cells(rows)),
            "",
        ]
    if not parts:
        return "No measurement of this operator is in the tree yet."
    if not any(name != "cpu" and (RESULTS / name / f"{op}.csv").exists() for name in devices()):
        parts.append("Not measured on a GPU yet. On CPU tensors it is PyTorch that runs, not the kernel.")
    return "\n".join(parts).rstrip()


def cells(rows: list[Row]) -> list[list[str]]:
    """Return a line for each case: our time, the best rival's, and their ratio; empty if there is no rival."""
    lines = []
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    for case in dict.fromkeys(row["case"] for row in rows):
        timed = [row for row in rows if row["case"] == case and row["mode"] == mode and row.get("p50_us")]
        ours = next((row for row in timed if row["provider"] == OURS), None)
        if ours is None:
            continue
        rivals = [row for row in timed if not row["provider"].startswith(OURS)]
        best = min(rivals, key=lambda row: float(row["p50_us"]), default=None)
        found = [case, short_time(float(ours["p50_us"])), f"{float(ours['roofline']):.0%}"]
        if best is None:
            found += ["", ""]
        else:
            ratio = float(best["p50_us"]) / float(ours["p50_us"])
            found += [f"{best['provider']}, {short_time(float(best['p50_us']))}", f"{ratio:.2f}"]
        lines.append(found)
    return lines


def render_operators(page: Path, device: str) -> str:
    """Render one table of all operators with rows on a device."""
    sources = {op: RESULTS / device / f"{op}.csv" for op in operators()}
    found = {op: rows for op, source in sources.items() if (rows := read_rows(source))}
    if not found:
        return "No measurement is in the tree yet."
    rows = [row for each in found.values() for row in each]
    lines = []
    for op, each in found.items():
        described = ROOT / "docs" / "ops" / f"{op}.md"
        target = f"ops/{op}.md" if described.exists() and page.parent == ROOT / "docs" else link(page, sources[op])
        lines += [[f"[{op}]({target})", *case] for case in cells(each)]
    ratios = [float(case[-1]) for case in lines if case[-1]]
    won = sum(ratio >= 1 for ratio in ratios)
    said = (
        f"{rows[0]['device']}, torch {rows[0]['torch']}, {all_of(rows, 'date')}, "
        f"{commits(next(iter(sources.values())), rows)}. "
        f"pc is the fastest in {won} of {len(ratios)} cases that have a rival; below 1.00 in the last column it loses."
    )
    return "\n".join([said, "", *table(("operator", *HEADS), "l" + SIDES, lines)])


def render_gpu_plan(_page: Path) -> str:
    """Render the steps of `make gpu`."""
    return "\n".join(table(("step", "what it does"), "ll", list(STEPS.items())))


def render_gpu(page: Path) -> str:
    """Render tables of every measured GPU, or what is missing."""
    found = [name for name in devices() if name != "cpu"]
    if found:
        parts = [(render_operators(page, name), _eager(name), _generate(page, name)) for name in found]
        return "\n\n".join("\n\n".join(each).rstrip() for each in parts)
    return "No GPU has been measured yet: `make gpu`."


def _eager(device: str, case: str = "decode 1x1k") -> str:
    """Render the eager times of a case so short that they are the host's."""
    rows = [row for row in read_rows(RESULTS / device / "paged_attention.csv") if row["case"] == case]
    times = {row["provider"]: float(row["p50_us"]) for row in rows if row["mode"] == "eager" and row["p50_us"]}
    said = ", ".join(f"{short_time(time)} ({name})" for name, time in sorted(times.items(), key=lambda item: item[1]))
    return f"Without a CUDA graph, {case} takes {said}."


KINDS = {"decodes": ("decode",), "prefills and chunks": ("prefill", "chunk")}
"""How names of cases of paged attention begin, by kind."""


def render_gpu_summary(page: Path) -> str:
    """Render a sentence for each GPU: our time beside that of the fastest rival, for each kind of case."""
    said = []
    for name in (name for name in devices() if name != "cpu"):
        source = RESULTS / name / "paged_attention.csv"
        rows = read_rows(source)
        parts = []
        for kind, begins in KINDS.items():
            ratios = sorted(1 / float(case[-1]) for case in cells(rows) if case[0].startswith(begins) and case[-1])
            middle = statistics.median(ratios)
            parts.append(f"{len(ratios)} {kind}: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {middle:.2f}.")
        device, rivals = rows[0]["device"], sorted({case[-2].rpartition(",")[0] for case in cells(rows) if case[-1]})
        beside = " and ".join(rivals)
        said += [f"Time of paged attention on {device}, divided by that of the faster of {beside}.", *parts]
        said.append(f"[Rows]({link(page, source)}).")
    return " ".join(said)


def _generate(page: Path, device: str) -> str:
    """Render generation with a model of a billion parameters: medians from the second request on."""
    source = RESULTS / device / "generate.csv"
    rows = [row for row in read_rows(source) if row["request"] not in ("", "1")]
    if not rows:
        return "Generation has not been measured here yet."
    first, lines = rows[0], []
    for way in dict.fromkeys(row["way"] for row in rows):
        chosen = [row for row in rows if row["way"] == way]
        seconds, rate = (statistics.median(float(row[c]) for row in chosen) for c in ("first_token_s", "tokens_per_s"))
        same = "yes" if all(row["same_as_transformers"] == "True" for row in chosen) else "no"
        lines.append([way, short_time(seconds * 1e6), f"{rate:.1f}", same])
    said = (
        f"{first['model']}, {first['dtype']}, prompts of {first['prompt_tokens']} tokens, all but the last few shared, "
    )
    heads = ("way", "first token", "tokens a second after it", "same tokens")
    return "\n".join(["### generate", "", said + measured(page, source, rows, ()), "", *table(heads, "lrrl", lines)])


def render_work_summary(page: Path) -> str:
    """Render the counted work in a sentence."""
    rows = [row for row in work_rows() if row["vLLM Triton.case"]]
    times = sorted(int(row["vLLM Triton.instructions"]) / int(row["pc.instructions"]) for row in rows)
    targets = " and ".join(dict.fromkeys(row["architecture"] for row in rows))
    return (
        f"{times[0]:.1f} to {times[-1]:.1f} times fewer warp instructions a step than vLLM "
        f"{rows[0]['vLLM Triton.version']}'s Triton kernel on the same tensors, results compared ({targets}, triton "
        f"{rows[0]['triton']}); [rows]({link(page, RESULTS / 'work.csv')})."
    )


def render_work_compressed(page: Path) -> str:
    """Render decodes over half of a document or prompt beside those over all of it, by the newest triton."""
    found, lines = {(row["architecture"], row["case"]): row for row in work_rows()}, []
    for (arch, case), row in found.items():
        name, is_half, how = case.partition(", ")
        if is_half and how in COMPRESSED and (arch, name) in found:
            dense = found[arch, name]
            shares = [f"{int(row[c]) / int(dense[c]):.3f}" for c in ("pc.instructions", "pc.loaded_bytes")]
            counts = [f"{int(each['pc.instructions']):,}" for each in (row, dense)]
            lines.append((COMPRESSED[how], name, arch, *counts, *shares))
    counted = ("warp instructions", "of the whole", "half / whole", "bytes read, half / whole")
    heads = ("half of", "step", "target", *counted)
    return with_rows(table(heads, "lllrrrr", lines), page, RESULTS / "work.csv")


COMPRESSED = {"half of a document kept": "a document", "packed into half of its blocks": "a prompt inside vLLM"}
"""Ends of the names of steps, and what is compressed in them."""


def work_rows() -> list[Row]:
    """Return a line for each step and target, with each provider's counts, by the newest triton."""
    return beside(newest_triton(read_rows(RESULTS / "work.csv")), "case architecture", "provider")
