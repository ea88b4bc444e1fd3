"""The tokens that agents' changes of their prompts make a cache compute with each reuse.

A trace has one line for each request: `session`, `timestamp` (microseconds), `input` (the prompt), `output`. If the
inputs of a session only grow, they hold what users and tools said, and the outputs are inserted between them. Eight
sessions run side by side; when one ends, the next begins. Prompts are cut to the model's length.

    untouched: nothing changes.
    marker: a clock in the first line of the prompt changes with each turn.
    thinking: the text before a command ("THOUGHT: ...") is removed from all turns but the latest.
    cleared: all tool results but the latest three are removed.

Counts come from a `CacheManager` with blocks of 16 tokens. One cache holds everything, another a tenth of the untouched
trace. A tenth of moved text is computed again and counts as computed. With `--hashed FOLDER` the command writes traces
for `pc replay` and counts nothing.

Examples:
    python -m benchmarks agents TRACE.jsonl.gz ...
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pc

from ..harness.experiment import Experiment, option
from .load import NAME, trained_tokenizer

BLOCK, BESIDE, KEPT, RECOMPUTE = 16, 8, 3, 0.1
POSITIONS = 8192
WAYS = ("prefix", "gap", "anywhere")

Turn = tuple[list[str], str]
"""The parts of a prompt, those of users and tools at even places and the model's between them, and its output."""
Request = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""


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


def requests_of(tokenizer: Any, sessions: list[list[tuple[float, Turn]]], variant: str) -> list[Request]:
    """Return token ids of prompts and answers in order; nothing if no prompt changes.

    A prompt and its answer fit into the model's positions together.
    """
    order = list(interleaved(sessions))
    texts = [VARIANTS[variant](parts, turn) for _, turn, (parts, _) in order]
    if variant != "untouched" and texts == [untouched(parts, 0) for _, _, (parts, _) in order]:
        return []

    def encode(text: str, most: int) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)[:most]
        return ids

    return [
        (encode(text, POSITIONS - 512), encode(output, 512))
        for text, (_, _, (_, output)) in zip(texts, order, strict=True)
    ]


def count(requests: list[Request], way: str, num_blocks: int) -> tuple[int, int, int, int]:
    """Return the tokens of all prompts, computed tokens, moved tokens, and the number of blocks cached in the end."""
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
    return asked, computed, moved, manager.stats().cached_blocks


def write_hashed(path: Path, requests: list[Request]) -> None:
    """Write the requests for `pc replay`, a second apart, with an id for each different block."""
    known: dict[tuple[int, ...], int] = {}
    with path.open("w", encoding="utf-8") as file:
        for second, (prompt, answer) in enumerate(requests):
            blocks = [tuple(prompt[at : at + BLOCK]) for at in range(0, len(prompt), BLOCK)]
            row = {"timestamp": 1000 * second, "input_length": len(prompt), "output_length": max(len(answer), 1)}
            row["hash_ids"] = [known.setdefault(block, len(known)) for block in blocks]
            file.write(json.dumps(row) + "\n")


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each trace, change, cache and way; with `--hashed`, write traces and yield nothing."""
    tokenizer = trained_tokenizer()
    for path in given.traces:
        trace, sessions, tenth = path.name.split(".")[0], sessions_of(path), 0
        for name in VARIANTS:
            requests = requests_of(tokenizer, sessions, name)
            if not requests:
                continue  # the trace has nothing that this changes
            whole = sum(len(prompt) + len(answer) for prompt, answer in requests) // BLOCK + 2 * len(requests)
            if given.hashed:
                write_hashed(given.hashed / f"agents_{trace}.jsonl", requests)
                break
            tenth = tenth or count(requests, "prefix", whole)[3] // 10
            longest = max(-(-(len(prompt) + len(answer)) // BLOCK) for prompt, answer in requests)
            for cache, num_blocks in (("all", max(whole, 2 * longest)), ("10%", max(tenth, 2 * longest))):
                for way in WAYS:
                    asked, computed, moved, _ = count(requests, way, num_blocks)
                    row = {"trace": trace, "variant": name, "cache": cache, "way": way, "blocks": num_blocks}
                    row |= {"prompts": len(requests), "prompt_tokens": asked, "computed_tokens": computed}
                    row |= {"hit_rate": f"{1 - computed / asked:.4f}", "moved_tokens": moved}
                    yield row | {"model": NAME}


main = Experiment(
    "agents.csv",
    rows,
    {
        "traces": option(nargs="+", type=Path),
        "--hashed": option(type=Path, help="write TRACE.jsonl for `pc replay` into this folder instead"),
    },
    ("trace", "variant", "cache", "way"),
    ("transformers",),
).main
