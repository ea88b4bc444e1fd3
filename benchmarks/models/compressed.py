"""A compressed document beside the whole text: bytes held, peak bytes while it is read, and the time of a decode.

Usage:

    python -m benchmarks compressed [--tokens 1500 6000] [--counts]

SmolLM2-135M reads real text and keeps a share of it (`handle.compress`). It then decodes behind a short question, over
the document and over transformers' own cache of the whole text, alternating in one process. Rows have medians. Times
need a quiet machine; --counts leaves them out. OMP_NUM_THREADS threads (1). Writes
results/cpu/compressed.csv; about two minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from ..harness.conditions import conditions, use_threads
from ..harness.tables import RESULTS, write_rows
from .load import alice, trained_model, trained_tokenizer

ROWS = RESULTS / "cpu" / "compressed.csv"
QUESTION, WARM = 16, 4
"""Tokens of the question, and decodes before those that count."""


@torch.inference_mode()
def measure(handle: Any, model: Any, ids: torch.Tensor, budget: float, steps: int) -> dict[str, str]:
    """Columns of a row; `ids [1, tokens]` are the text and, last, the question; no steps: no times."""
    from pc.integrations.huggingface.api import CACHE, result_cache
    from pc.integrations.huggingface.compression.layers import Questions

    context = ids[:, :-QUESTION]
    document = handle.compress(context, budget=budget)
    over = Questions(document.content)
    whole = result_cache(model(ids, use_cache=True, logits_to_keep=1))
    dense = sum(side[:, :, : context.shape[1]].nbytes for layer in whole.layers for side in (layer.keys, layer.values))
    row = {"tokens": str(context.shape[1]), "budget": f"{budget:g}", "held_bytes": str(document.nbytes)}
    row |= {"peak_bytes": str(document.peak_nbytes), "dense_bytes": str(dense)}
    if not steps:
        return row
    model(ids[:, -QUESTION:], **{CACHE: over}, position_ids=torch.arange(ids.shape[1])[None, -QUESTION:])
    times: dict[str, list[float]] = {"plain": [], "pc": []}
    ways = [("plain", whole), ("pc", over)]
    for step in range(WARM + steps):
        token, place = ids[:, :1], torch.tensor([[ids.shape[1] + step]])
        for way, cache in ways[:: 1 if step % 2 else -1]:
            begin = time.perf_counter()
            model(token, **{CACHE: cache}, position_ids=place)
            times[way].append(time.perf_counter() - begin)
    for way, took in times.items():
        row[f"{way}_ms"] = f"{statistics.median(took[WARM:]) * 1e3:.3f}"
    return row | {"steps": str(steps)}


def main() -> None:
    """Prints and writes the rows."""
    from pc.demo._models import read_document
    from pc.demo._trained import NAME
    from pc.integrations.huggingface import enable_prefix_caching

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1500, 6000], help="of the text")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=101, help="decodes of which the median is taken")
    parser.add_argument("--counts", action="store_true", help="bytes alone, which need no quiet machine")
    given = parser.parse_args()
    use_threads()
    model, text = trained_model(), trained_tokenizer().encode(alice() + read_document())
    rows = []
    with enable_prefix_caching(model, num_blocks=16) as handle:
        for tokens in given.tokens:
            if tokens + QUESTION > len(text):
                parser.error(f"--tokens: got {tokens}, needs at most {len(text) - QUESTION}")
            ids = torch.tensor([text[: tokens + QUESTION]])
            row = {"model": NAME, "dtype": "float32", "press": "snapkv"}
            row |= measure(handle, model, ids, given.budget, 0 if given.counts else given.steps)
            rows.append(row | conditions("cpu", "transformers"))
            print(*row.values(), flush=True)
    write_rows(ROWS, rows)
