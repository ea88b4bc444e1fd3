"""A compressed document beside the whole text: bytes held, peak bytes while it is read, and the time of a decode.

SmolLM2-135M reads real text and keeps a share of it (`handle.compress`). It then decodes after a short question, over
the document and over transformers' own cache of the whole text, alternating in one process. Rows have medians. Times
need a quiet machine; --counts leaves them out. About two minutes with OMP_NUM_THREADS threads (1).

Examples:
    python -m benchmarks compressed --tokens 1500 6000 --counts
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..harness.experiment import Experiment, option
from ..harness.timing import by_turns
from .load import NAME, alice, read_document, trained_model, trained_tokenizer

QUESTION, WARM = 16, 4
"""Tokens of the question, and decodes before those that count."""


@torch.inference_mode()
def measure(handle: Any, model: Any, ids: torch.Tensor, budget: float, steps: int) -> dict[str, str]:
    """Return the columns of a row, without times if `steps` is 0; `ids [1, tokens]` are the text, then the question."""
    from pc.integrations.huggingface.api import CACHE, result_cache
    from pc.integrations.huggingface.compression.layers import question_cache

    context = ids[:, :-QUESTION]
    document = handle.compress(context, budget=budget)
    over = question_cache(document.content)
    whole = result_cache(model(ids, use_cache=True, logits_to_keep=1))
    dense = sum(side[:, :, : context.shape[1]].nbytes for layer in whole.layers for side in (layer.keys, layer.values))
    row = {"tokens": str(context.shape[1]), "budget": f"{budget:g}", "held_bytes": str(document.nbytes)}
    row |= {"peak_bytes": str(document.peak_nbytes), "dense_bytes": str(dense)}
    if not steps:
        return row
    model(ids[:, -QUESTION:], **{CACHE: over}, position_ids=torch.arange(ids.shape[1])[None, -QUESTION:])
    caches, places = {"plain": whole, "pc": over}, itertools.count(ids.shape[1])

    def decode(way: str, place: int) -> float:
        begin = time.perf_counter()
        model(ids[:, :1], **{CACHE: caches[way]}, position_ids=torch.tensor([[place]]))
        return time.perf_counter() - begin

    for way, took in by_turns(decode, caches, WARM + steps, lambda: next(places)).items():
        row[f"{way}_ms"] = f"{statistics.median(took[WARM:]) * 1e3:.3f}"
    return row | {"steps": str(steps)}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each length of the text."""
    from pc.integrations.huggingface import enable_prefix_caching

    model, text = trained_model(), trained_tokenizer().encode(alice() + read_document())
    if max(given.tokens) + QUESTION > len(text):
        raise SystemExit(f"--tokens: got {max(given.tokens)}, needs at most {len(text) - QUESTION}")
    with enable_prefix_caching(model, num_blocks=16) as handle:
        for tokens in given.tokens:
            ids = torch.tensor([text[: tokens + QUESTION]])
            row = {"model": NAME, "dtype": "float32", "press": "snapkv"}
            yield row | measure(handle, model, ids, given.budget, 0 if given.counts else given.steps)


main = Experiment(
    "compressed.csv",
    rows,
    {
        "--tokens": option([1500, 6000], "of the text"),
        "--budget": option(0.5),
        "--steps": option(101, "decodes of which the median is taken"),
        "--counts": option(False, "bytes alone, which need no quiet machine"),
    },
    packages=("transformers",),
).main
