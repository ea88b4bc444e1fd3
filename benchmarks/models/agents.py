"""The tokens that agents' changes of their prompts make a cache compute, and the loss and savings of each reuse.

A trace has one line for each request: `session`, `timestamp` (microseconds), `input` (the prompt), `output`. If the
inputs of a session only grow, they hold what users and tools said, and the outputs are inserted between them. Eight
sessions run side by side; when one ends, the next begins. Prompts are cut to the model's length.

    untouched   no change
    marker      a clock in the first line of the prompt changes with each turn
    thinking    the text before a command ("THOUGHT: ...") is removed from all turns but the latest
    cleared     all tool results but the latest three are removed

Counts come from a `CacheManager` with blocks of 16 tokens. One cache holds everything, another a tenth of the untouched
trace. A tenth of moved text is computed again and counts as computed. With `--sample N`, the first N turns of the first
session also go through generate with SmolLM2-135M-Instruct, exactly and with reuse="anywhere". This gives the
divergence of the next-token distributions and the share of equal first tokens. With `--hashed FOLDER` the command
writes traces for `pc replay` and counts nothing.

Examples:
    python -m benchmarks agents TRACE.jsonl.gz ... [--sample 6]
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pc
from pc.cache.replay.traces import prefix_ids

from ..harness.experiment import Experiment, option
from .load import NAME, trained_model, trained_tokenizer

BLOCK, BESIDE, KEPT, ANSWER, RECOMPUTE = 16, 8, 3, 8, 0.1
POSITIONS = 8192
WAYS = ("prefix", "gap", "anywhere")

Turn = tuple[list[str], str]
"""The parts of a prompt, those of users and tools at even places and the model's between them, and its output."""


def sessions_of(path: Path) -> list[list[tuple[float, Turn]]]:
    """Return the turns of each session in order, with their times in seconds."""
    rows: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            rows.setdefault(row["session"], []).append(row)
    found = []
    for session in rows.values():
        session.sort(key=lambda row: row["timestamp"])
        turns: list[tuple[float, Turn]] = []
        parts: list[str] = []
        before: dict[str, Any] = {"input": "", "output": ""}
        for row in session:
            if turns and row["input"].startswith(before["input"]) and row["input"] != before["input"]:
                parts = [*parts, before["output"], row["input"][len(before["input"]) :]]
            else:
                parts = [row["input"]]
            turns.append((row["timestamp"] / 1e6, (parts, row["output"])))
            before = row
        found.append(turns)
    return found


def untouched(parts: list[str], turn: int) -> str:
    """Return the prompt without a change."""
    return "".join(parts)


def marker(parts: list[str], turn: int) -> str:
    """Return the prompt with a clock in its first line."""
    return f"It is {9 + turn // 60}:{turn % 60:02}.\n" + "".join(parts)


def thinking(parts: list[str], turn: int) -> str:
    """Return the prompt without the text before a command, except in the latest answer."""
    last = len(parts) - 2
    strip = re.compile(r"THOUGHT:.*?(?=```|\Z)", re.DOTALL)
    return "".join(strip.sub("", part) if at % 2 and at != last else part for at, part in enumerate(parts))


def cleared(parts: list[str], turn: int) -> str:
    """Return the prompt with the latest results only."""
    results = re.compile(r"(?<=<output>\n).*?(?=</output>)", re.DOTALL)
    return "".join(
        results.sub("(cleared)\n", part) if at and not at % 2 and at < len(parts) - 2 * KEPT else part
        for at, part in enumerate(parts)
    )


VARIANTS: dict[str, Callable[[list[str], int], str]] = {
    "untouched": untouched, "marker": marker, "thinking": thinking, "cleared": cleared,
}  # fmt: skip


def interleaved(sessions: list[list[tuple[float, Turn]]]) -> Iterator[tuple[int, int, Turn]]:
    """Yield sessions, turns and prompts in the order of a clock; the first sessions start a second apart."""
    waiting = list(enumerate(sessions))
    running: list[tuple[float, int, int, float]] = []
    begin, clock = 0, 0.0
    while running or begin < len(waiting):
        while len(running) < BESIDE and begin < len(waiting):
            shift = clock + (begin if begin < BESIDE else 1) - sessions[begin][0][0]
            heapq.heappush(running, (sessions[begin][0][0] + shift, begin, 0, shift))
            begin += 1
        clock, session, turn, shift = heapq.heappop(running)
        yield session, turn, sessions[session][turn][1]
        if turn + 1 < len(sessions[session]):
            heapq.heappush(running, (sessions[session][turn + 1][0] + shift, session, turn + 1, shift))


def requests_of(
    tokenizer: Any, sessions: list[list[tuple[float, Turn]]], variant: str
) -> tuple[list[tuple[int, int]], list[tuple[list[int], list[int]]]]:
    """Return sessions and turns in order, and token ids of prompts and answers; nothing if no prompt changes.

    A prompt and its answer fit into the model's positions together.
    """
    order = list(interleaved(sessions))
    texts = [VARIANTS[variant](parts, turn) for _, turn, (parts, _) in order]
    if variant != "untouched" and texts == [untouched(parts, 0) for _, _, (parts, _) in order]:
        return [], []

    def encode(text: str, most: int) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)[:most]
        return ids

    prompts = [encode(text, POSITIONS - 512) for text in texts]
    answers = [encode(output, 512) for _, _, (_, output) in order]
    return [(session, turn) for session, turn, _ in order], list(zip(prompts, answers, strict=True))


def count(requests: list[tuple[list[int], list[int]]], way: str, num_blocks: int) -> tuple[int, int, int]:
    """Return the numbers of tokens of prompts, of computed tokens and of moved tokens over all requests."""
    manager, asked, computed, moved = pc.CacheManager(num_blocks, BLOCK), 0, 0, 0
    for number, (prompt, answer) in enumerate(requests):
        allocation = manager.allocate(number, prompt, reuse=way)
        asked += len(prompt)
        computed += sum(end - start for start, end in allocation.compute_spans)
        computed += len(allocation.recompute_moved(RECOMPUTE))
        moved += sum(span.end - span.start for span in allocation.moved)
        if answer:
            manager.append(number, answer)
        manager.commit(number, len(prompt) + len(answer))
        manager.free(number)
    return asked, computed, moved


def block_ids(prompts: Iterable[list[int]], size: int) -> list[np.ndarray]:
    """Return, for each prompt, an id for each prefix of blocks of `size` tokens; the last block may be shorter."""
    known: dict[tuple[int, ...], int] = {}
    blocks = [[tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)] for tokens in prompts]
    return prefix_ids([np.array([known.setdefault(block, len(known)) for block in row], np.int64) for row in blocks])


def write_hashed(path: Path, requests: list[tuple[list[int], list[int]]]) -> None:
    """Write the requests for `pc replay`, a second apart, with an id for each prefix of blocks."""
    hashed = block_ids((prompt for prompt, _ in requests), BLOCK)
    with path.open("w", encoding="utf-8") as file:
        for second, ((prompt, answer), ids) in enumerate(zip(requests, hashed, strict=True)):
            row = {"timestamp": 1000 * second, "input_length": len(prompt), "output_length": max(len(answer), 1)}
            file.write(json.dumps(row | {"hash_ids": ids.tolist()}) + "\n")


def count_unique(requests: list[tuple[list[int], list[int]]], num_blocks: int) -> int:
    """Return how many blocks a cache that never evicts holds in the end."""
    manager = pc.CacheManager(num_blocks, BLOCK)
    for number, (prompt, answer) in enumerate(requests):
        manager.allocate(number, [*prompt, *answer])
        manager.commit(number, len(prompt) + len(answer))
        manager.free(number)
    return manager.stats().cached_blocks


def lost(model: Any, prompts: list[list[int]]) -> dict[str, str]:
    """Return the loss of `reuse="anywhere"` against exact prefix caching, over turns of a session but the first."""
    from .reuse_anywhere import Workload, row, run

    workload = Workload("agents", 4 * max(map(len, prompts)), (lambda turn, answers: prompts[turn], len(prompts)))
    exact = run(model, workload, None, None)
    moved = run(model, workload, RECOMPUTE, exact)
    first = [one.logits[0].argmax() == want.logits[0].argmax() for one, want in zip(moved, exact, strict=True)][1:]
    found = row(workload, moved, exact, "anywhere", "")
    return {"sampled_prompts": str(len(first)), "kl": found["kl"], "first_equal": f"{np.mean(first):.3f}"}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each trace, change, cache and way; with `--hashed`, write traces and yield nothing."""
    tokenizer, model = trained_tokenizer(), trained_model() if given.sample else None
    for path in given.traces:
        trace, sessions, tenth = path.name.split(".")[0], sessions_of(path), 0
        for name in dict.fromkeys(("untouched", *given.variants)):
            order, requests = requests_of(tokenizer, sessions, name)
            if not requests:
                continue  # the trace has nothing that this changes
            whole = sum(len(prompt) + len(answer) for prompt, answer in requests) // BLOCK + 2 * len(requests)
            if given.hashed:
                write_hashed(given.hashed / f"agents_{trace}.jsonl", requests)
                break
            tenth = tenth or count_unique(requests, whole) // 10
            if name not in given.variants:
                continue
            loss = {}
            if model is not None:
                turns = [prompt for (session, _), (prompt, _) in zip(order, requests, strict=True) if session == 0]
                loss = lost(model, turns[: given.sample])
            longest = max(-(-(len(prompt) + len(answer)) // BLOCK) for prompt, answer in requests)
            for cache, num_blocks in (("all", max(whole, 2 * longest)), ("10%", max(tenth, 2 * longest))):
                for way in WAYS:
                    asked, computed, moved = count(requests, way, num_blocks)
                    row = {"trace": trace, "variant": name, "cache": cache, "way": way, "blocks": num_blocks}
                    row |= {"prompts": len(requests), "prompt_tokens": asked, "computed_tokens": computed}
                    row |= {"hit_rate": f"{1 - computed / asked:.4f}", "moved_tokens": moved}
                    row |= {"sampled_prompts": "", "kl": "", "first_equal": ""} | (loss if way == "anywhere" else {})
                    yield row | {"model": NAME}


main = Experiment(
    "agents.csv",
    rows,
    {
        "traces": option(nargs="+", type=Path),
        "--variants": option(list(VARIANTS), choices=list(VARIANTS)),
        "--sample": option(0, "turns of the first session through the model"),
        "--hashed": option(type=Path, help="write TRACE.jsonl for `pc replay` into this folder instead"),
    },
    ("trace", "variant", "cache", "way"),
    ("transformers",),
).main
