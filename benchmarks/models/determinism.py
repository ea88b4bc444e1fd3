"""The time to the first token with and without `deterministic=True`, in turns.

SmolLM2-135M-Instruct in float32 reads a new document, then the same document with a question behind it. Times are CPU
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
from ..harness.timing import median, over, rotated
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

    times: dict[tuple[str, bool], list[float]] = {(which, way): [] for which in ("cold", "warm") for way in models}
    for way in models:
        call(way, torch.randint(100, 40_000, (1, given.chunk)))  # the first call takes longer
    for turn in range(given.rounds):
        document = torch.randint(100, 40_000, (1, COLD))
        asked = torch.cat([document, torch.randint(100, 40_000, (1, QUESTION))], 1)
        for way in rotated(models, turn):
            handles[way].reset()
            times["cold", way].append(call(way, document))
            times["warm", way].append(call(way, asked))
    for which in ("cold", "warm"):
        plain, own = times[which, False], times[which, True]
        row = {"call": which, "prompt_tokens": COLD, "chunk": given.chunk, "rounds": given.rounds}
        row |= {"plain_s": median(plain, digits=3), "own_s": median(own, digits=3)}
        yield row | {"over_plain": f"{over(own, plain):.3f}"}


main = Experiment("determinism.csv", rows, {"--chunk": option(128), "--rounds": option(5)}, ("call", "chunk")).main
