"""The time to the first token with and without `deterministic=True`, in turns.

SmolLM2-135M-Instruct in float32 reads a new document, then the same document with a question after it. Times are CPU
time, with OMP_NUM_THREADS threads (1).

Examples:
    python -m benchmarks determinism --chunk 256
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..harness.experiment import Experiment, option
from ..harness.timing import by_turns, median, over
from .load import trained_model

COLD, QUESTION = 2048, 24
"""Tokens of the document and of the question."""


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for a cold call, and one for a call with all but the question cached."""
    from pc.integrations.huggingface import enable_prefix_caching

    models = {way: trained_model() for way in (False, True)}
    handles = {
        way: enable_prefix_caching(model, num_blocks=1024, deterministic=way, chunk=given.chunk)
        for way, model in models.items()
    }

    def call(way: bool, ids: torch.Tensor) -> float:
        begin = time.process_time()
        models[way].generate(ids, max_new_tokens=1)
        return time.process_time() - begin

    def measure(way: bool, asked: torch.Tensor) -> tuple[float, float]:
        handles[way].reset()
        return call(way, asked[:, :COLD]), call(way, asked)

    for way in models:
        call(way, torch.randint(100, 40_000, (1, given.chunk)))  # the first call takes longer
    found = by_turns(measure, models, given.rounds, lambda: torch.randint(100, 40_000, (1, COLD + QUESTION)))
    for at, which in enumerate(("cold", "warm")):
        plain, own = ([times[at] for times in found[way]] for way in (False, True))
        row = {"call": which, "prompt_tokens": COLD, "chunk": given.chunk, "rounds": given.rounds}
        row |= {"plain_s": median(plain, digits=3), "own_s": median(own, digits=3)}
        yield row | {"over_plain": f"{over(own, plain):.3f}"}


main = Experiment("determinism.csv", rows, {"--chunk": option(128), "--rounds": option(5)}, ("call", "chunk")).main
