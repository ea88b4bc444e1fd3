"""Tables of what a trained model loses to caches that hold less."""

from __future__ import annotations

import math
from pathlib import Path

from ..harness.tables import RESULTS, Row, read_rows
from .markdown import measured, table

Loss = dict[str, float]
KINDS = {
    "cache": "stored in",
    "pressed": "press",
    "chosen": "which blocks a query reads",
}

ROUNDING = 1e-7
"""KL divergence between float32 computations of the same, either sign."""


def quality_rows() -> list[Row]:
    """Return the rows of every text and method."""
    return read_rows(RESULTS / "cpu" / "quality.csv")


def losses(rows: list[Row]) -> dict[tuple[str, str, float], Loss]:
    """Return losses by kind, method and budget, over all tokens of prose, with the answers to the questions."""
    found: dict[tuple[str, str, float], Loss] = {}
    for key in dict.fromkeys((row["kind"], row["method"], float(row["budget"])) for row in rows):
        own = [row for row in rows if (row["kind"], row["method"], float(row["budget"])) == key]
        prose = [row for row in own if not row["questions"]]
        tokens = [int(row["tokens"]) for row in prose]

        def mean(values: list[float], tokens: list[int] = tokens) -> float:
            return sum(n * value for n, value in zip(tokens, values, strict=True)) / sum(tokens)

        found[key] = {
            "perplexity": math.exp(mean([math.log(float(row["perplexity"])) for row in prose])),
            "kl": mean([float(row["kl"]) for row in prose]),
            "same": mean([float(row["same_top1"]) for row in prose]),
            "tokens": sum(tokens),
        }
        for row in own:
            if row["questions"]:
                found[key] |= {"answers": int(row["answers"]), "questions": int(row["questions"])}
    return found


def _nats(divergence: float) -> str:
    return f"{divergence:.2g}" if abs(divergence) > ROUNDING else f"below {ROUNDING:.0e}"


def render_quality(page: Path, kind: str) -> str:
    """Render the methods of a kind, a line for each budget."""
    rows = [row for row in quality_rows() if row["kind"] in (kind, "full")]
    lines = []
    for (of, name, budget), loss in losses(rows).items():
        share = "" if of == "full" or kind == "cache" else f"{budget:.0%}"
        answers = f"{loss['answers']:.0f} of {loss['questions']:.0f}" if "answers" in loss else ""
        figures = (f"{loss['perplexity']:.2f}", _nats(loss["kl"]), f"{loss['same']:.1%}", answers)
        lines.append(("full attention" if of == "full" else name, share, *figures))
    heads = (KINDS[kind], "budget", "perplexity", "KL", "same most likely token", "answers")
    columns = len(heads) if any(line[-1] for line in lines) else len(heads) - 1
    return "\n".join(table(heads[:columns], "lrrrrr"[:columns], (line[:columns] for line in lines)))


def render_quality_conditions(page: Path) -> str:
    """Render the conditions of all losses, and the number of tokens."""
    rows = quality_rows()
    (full,) = (loss for key, loss in losses(rows).items() if key[0] == "full")
    said = measured(page, RESULTS / "cpu" / "quality.csv", rows, ("torch", "transformers"))
    texts = ", ".join(dict.fromkeys(row["text"] for row in rows))
    counted = f"{full['tokens']:.0f} tokens of prose that count; texts measured: {texts}"
    return f"{rows[0]['model']}, {rows[0]['dtype']}, {counted}. {said}"


def render_quality_summary(page: Path) -> str:
    """Render the losses in a sentence."""
    found = losses(quality_rows())
    full = found["full", "full", 1.0]
    fp8, int8 = (found["cache", name, 1.0] for name in ("float8_e4m3fn", "int8"))
    snapkv, streaming, pages = (
        f"{found[kind, name, 0.1]['perplexity']:.1f}"
        for kind, name in (("pressed", "snapkv"), ("pressed", "streaming"), ("chosen", "Quest-like pages"))
    )
    return (
        f"perplexity {full['perplexity']:.1f} with full attention, {fp8['perplexity']:.1f} from a float8 and "
        f"{int8['perplexity']:.1f} from an int8 cache; with 10% of the prompt {snapkv} by snapkv, {streaming} by the "
        f"first and last tokens, and {pages} by pages that each query chooses."
    )
