"""The demo in a sentence, and the families of models that are served."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

from ..harness.tables import RESULTS, Row, read_rows
from .markdown import by_version, commits, link, measured, table


def demo_rows() -> list[Row]:
    """Return the rows of the demo's requests."""
    return read_rows(RESULTS / "cpu" / "demo.csv")


def _later(workload: str) -> float:
    ratios = [float(r["ratio"]) for r in demo_rows() if r["workload"] == workload and r["request"] != "1"]
    return statistics.median(ratios)


def render_demo_conditions(page: Path) -> str:
    """Render the demo's result in a sentence."""
    rows, source = demo_rows(), RESULTS / "cpu" / "demo.csv"
    tokens = [int(row["prompt_tokens"]) for row in rows if row["workload"] == "document"]
    same = "Every token is the same as without the cache" if all(r["same"] == "yes" for r in rows) else "Tokens differ"
    return (
        f"questions about a document of {min(tokens):,} tokens, from the second on, get their first token "
        f"{_later('document'):.0f} times sooner; rounds of a conversation, {_later('conversation'):.1f} times "
        "(medians; "
        f"{rows[0]['dtype']}, {rows[0]['model']}, {rows[0]['threads']} threads, torch {rows[0]['torch']}, "
        f"{commits(source, rows)}). {same}; [rows]({link(page, source)})."
    )


KINDS = {
    "full attention": "Llama Qwen2 Qwen3 Qwen3Moe Mixtral Phi3 Olmo2 Glm4 Glm4Moe Granite SmolLM3 GPT2 Bloom Falcon",
    "windows, chunks, sinks": "Mistral Gemma2 Gemma3 Gemma3n Gemma4 GptOss Llama4 Cohere2 Olmo3 Exaone4",
    "latent attention": "DeepseekV2 DeepseekV3 DeepseekV32 Mistral4 MiniCPM3 Glm4MoeLite LongcatFlash",
    "recurrent states": "Qwen3Next Qwen3_5 NemotronH GraniteMoeHybrid FalconH1 Lfm2 OlmoHybrid KimiLinear Jamba Mamba2 "
    "Mamba",
    "vision-language": "Gemma3 Gemma4 Llava LlavaNext LlavaOnevision Qwen2VL Qwen2_5_VL Qwen3VL Qwen3_5 Llama4 Glm4v "
    "InternVL Idefics3 SmolVLM",
    "fall back": "RecurrentGemma DeepseekV4 Zamba Rwkv",
}
"""Families that a newcomer looks for, by kind of layer."""


def _families() -> dict[str, dict[str, Row]]:
    """Return the rows of each class by version of transformers, oldest version first."""
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(read_rows(RESULTS / "cpu" / "families.csv"), key=lambda row: by_version(row["transformers"])):
        found.setdefault(row["class"], {})[row["transformers"]] = row
    return found


def _latest() -> list[Row]:
    """Return a row for each class: that of the newest transformers that could build it."""
    built = ([row for row in rows.values() if row["outcome"] != "not built"] for rows in _families().values())
    return [rows[-1] for rows in built if rows]


def render_families(_page: Path) -> str:
    """Render a line for each kind of model, from the rows of every class."""
    lines = []
    for kind, names in KINDS.items():
        outcome = "falls back" if kind == "fall back" else "served"
        suffixes = ("ForConditionalGeneration",) if kind == "vision-language" else ("ForCausalLM", "LMHeadModel")
        classes = [row["class"] for row in _latest() if row["outcome"] == outcome]
        found = {name.removesuffix(end) for name in classes for end in suffixes if name.endswith(end)}
        lines.append((kind, ", ".join(name for name in names.split() if name in found)))
    return "\n".join(table(("models", "families, of those that were run"), "ll", lines))


def render_families_served(_page: Path) -> str:
    """Render the names of all classes that are served, by how many tokens of a prompt they reuse."""
    served = [row for row in _latest() if row["outcome"] == "served"]
    lines = []
    for reused in sorted({int(row["reused"]) for row in served}, reverse=True):
        names = sorted(row["class"] for row in served if int(row["reused"]) == reused)
        lines.append((str(reused), str(len(names)), ", ".join(names)))
    return "\n".join(table(("reused of 70", "classes", "names"), "rrl", lines))


def render_families_fallen(_page: Path) -> str:
    """Render the classes that fall back, each with its reason."""
    rows = sorted((row["class"], row["why"]) for row in _latest() if row["outcome"] == "falls back")
    lines = [(name, why.removeprefix(f"{name}: ").partition(" (")[0]) for name, why in rows]
    return "\n".join(table(("class", "reason"), "ll", lines))


OUTCOMES = {
    "served": "served, same tokens",
    "different": "other tokens",
    "falls back": "fall back",
    "not built": "not built small",
}
"""Outcomes of a class, and the heads of their columns."""


def render_families_versions(page: Path) -> str:
    """Render what each transformers gave, the classes whose outcome differs between them, and the conditions."""
    families = _families()
    versions = sorted({version for rows in families.values() for version in rows}, key=by_version)
    lines = []
    for version in versions:
        rows = [known[version] for known in families.values() if version in known]
        outcomes = Counter(row["outcome"] for row in rows)
        warned = sum(int(row["warnings"] or 0) > 0 for row in rows if row["outcome"] == "served")
        lines.append((version, *(str(outcomes[name]) for name in OUTCOMES), str(warned)))
    heads = ("transformers", *OUTCOMES.values(), "served with a warning")
    unlike = []
    for name, known in families.items():
        outcomes_of = {version: row["outcome"] for version, row in known.items()}
        if len(set(outcomes_of.values())) > 1:
            unlike.append(f"{name} ({', '.join(map(': '.join, outcomes_of.items()))})")
    newest = [known[versions[-1]] for known in families.values() if versions[-1] in known]
    said = measured(page, RESULTS / "cpu" / "families.csv", newest, ("torch", "transformers"))
    differ = f"Not the same with all versions: {', '.join(unlike) or 'none'}."
    return "\n".join([*table(heads, "lrrrrr", lines), "", differ, "", said])


def render_families_summary(_page: Path) -> str:
    """Render how many classes the newest transformers that was run has served."""
    families = _families()
    newest = max((version for rows in families.values() for version in rows), key=by_version)
    served = sum(rows[newest]["outcome"] == "served" for rows in families.values() if newest in rows)
    return f"{served} classes of transformers {newest.rpartition('.')[0]}"
