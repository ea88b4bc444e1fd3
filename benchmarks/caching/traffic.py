"""Generated traffic of many kinds, on which an eviction policy is compared with lru, also in its worst window.

The rules are those of `python -m pc replay`. The worst window is the lowest ratio to lru over a fixed number of
requests. Windows in which lru hits less than a fiftieth of its share do not count. `KINDS` are common traffic; `STRESS`
changes in ways that no policy can foresee.

Examples:
    PYTHONPATH=src python -m benchmarks traffic --policy default
    PYTHONPATH=src python -m benchmarks traffic --kinds law_flips,concatenated --capacity 3%,10%
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any

import numpy as np

from pc.cache.replay import Trace, replay

from ..harness.experiment import Experiment, option

Rng = np.random.Generator
Draw = Callable[[Rng], float]
Requests = Iterator[tuple[list[int], int]]
"""For each request its blocks, named by whole prefixes, and the number of tokens it generates."""


def new_ids() -> Callable[[float], list[int]]:
    """Return a function that gives so many fresh names of blocks, at least one."""
    numbers = count()
    return lambda number: list(islice(numbers, max(1, int(number))))


def near(mean: float) -> Draw:
    """Return a draw around a mean, never below 1, with a long tail."""
    return lambda rng: 1 + rng.gamma(2.0, (mean - 1) / 2.0) if mean > 1 else 1.0


SIX, THREE, EIGHT = near(6), near(3), near(8)


def sessions(
    rng: Rng,
    turns: Draw,
    gap: Draw,
    first: Draw = SIX,
    grow: Draw = THREE,
    prompts: int = 0,
    arrival: Callable[[int], float] = lambda i: 1.0,
    output: Callable[[Rng, bool], float] = lambda rng, last: 200 * rng.random(),
) -> Requests:
    """Yield conversations side by side. A turn has all blocks before it, `grow` more, and a partial one used once.

    Args:
        rng: Source of all draws.
        turns: Number of a conversation's turns.
        gap: Time between two turns; a new conversation begins every `arrival`.
        first: Blocks of the first turn.
        grow: Blocks that each turn adds.
        prompts: System prompts of 4 blocks that conversations begin with, the first of them often; 0: none.
        arrival: Mean time until the next conversation, by its number.
        output: Tokens of a turn, by whether it is the last.
    """
    take = new_ids()
    shared = [take(4) for _ in range(prompts)]
    waiting: list[tuple[float, int, list[int], int]] = []
    now = 0.0
    for number in count():
        now += rng.exponential(arrival(number))
        waiting.sort(key=lambda each: each[:2])
        while waiting and waiting[0][0] <= now:
            at, chat, chain, left = waiting.pop(0)
            yield [*chain, *take(1)], int(output(rng, left == 1))
            if left > 1:
                entry = (at + gap(rng), chat, [*chain, *take(grow(rng))], left - 1)
                waiting.append(entry)
                waiting.sort(key=lambda each: each[:2])
        root = shared[min(int(rng.zipf(1.5)), prompts) - 1] if prompts else []
        waiting.append((now, number, [*root, *take(first(rng))], max(1, int(turns(rng)))))


def documents(rng: Rng, choose: Callable[[int], int], size: float = 12, question: float = 2) -> Requests:
    """Yield questions about documents; `choose` returns the document from the number of the request."""
    take = new_ids()
    known: dict[int, list[int]] = {}
    for number in count():
        which = choose(number)
        if which not in known:
            known[which] = take(near(size)(rng))
        yield [*known[which], *take(question)], int(300 * rng.random())


def turns_of(mean: float) -> Draw:
    return lambda rng: float(rng.geometric(1 / mean))


def tree(rng: Rng) -> Requests:
    """Return searches that continue from any node of a tree, more often from deep ones."""
    take = new_ids()
    while True:
        nodes = [take(8)]
        for _ in range(int(near(40)(rng))):
            base = nodes[-min(len(nodes), int(rng.geometric(0.3)))]
            nodes.append([*base, *take(near(2)(rng))])
            yield nodes[-1], int(100 * rng.random())


def mixed(rng: Rng, parts: list[Requests], share: Callable[[int], int]) -> Requests:
    """Yield requests of several sources, with different names of blocks."""
    for number in count():
        part = share(number)
        blocks, output = next(parts[part])
        yield [len(parts) * block + part for block in blocks], output


def chat(rng: Rng, mean: float = 3, gap: float = 60) -> Requests:
    return sessions(rng, turns_of(mean), near(gap))


def agents(rng: Rng) -> Requests:
    return sessions(rng, near(30), near(4), first=near(20), grow=near(4), arrival=lambda i: 20.0, prompts=2)


def scans(rng: Rng) -> Requests:
    return mixed(rng, [popular(rng, 1.2), sessions(rng, turns_of(1), near(2))], lambda i: int(rng.random() < 0.6))


def popular(rng: Rng, power: float) -> Requests:
    return documents(rng, lambda i: int(rng.zipf(power)) % 100_000)


def telling(rng: Rng, short_returns: bool) -> Requests:
    """Return conversations whose last answer is long, or short, so that the output says whether a turn follows."""

    def output(rng: Rng, last: bool) -> float:
        return (300 if last == short_returns else 10) * (0.5 + rng.random())

    return sessions(rng, turns_of(2.5), near(80), output=output)


def flips(rng: Rng, number: int) -> Requests:
    return mixed(rng, [telling(rng, True), telling(rng, False)], lambda i: int(i >= number // 2))


def alternating(rng: Rng, every: int) -> Requests:
    return mixed(rng, [telling(rng, True), telling(rng, False)], lambda i: i // every % 2)


def concatenated(rng: Rng, number: int) -> Requests:
    parts = [chat(rng), agents(rng), popular(rng, 1.3), loop(rng), chat(rng, 6, 200)]
    return mixed(rng, parts, lambda i: min(i * len(parts) // number, len(parts) - 1))


def loop(rng: Rng) -> Requests:
    return documents(rng, lambda i: i % 300)


def scans_and_loops(rng: Rng) -> Requests:
    """Return, in turn, documents that are read once, documents that are read again and again, and both."""
    once = documents(rng, lambda i: i, size=40)
    again = documents(rng, lambda i: i % 160 if i % 450 < 300 else int(rng.integers(160)), size=25, question=1)
    return mixed(rng, [once, again], lambda i: int((i % 900 >= 600 and rng.random() < 0.5) or 300 <= i % 900 < 600))


def tools(
    rng: Rng,
    arrival: Callable[[int], float] = lambda i: 8.0,
    turns: Draw = EIGHT,
    roles: int = 1,
    helpers: float = 0.0,
    rewritten: float = 0.0,
    paused: float = 0.0,
) -> Requests:
    """Return short-lived agents that call tools after shared system prompts, many of them side by side.

    A turn sends all blocks before it, the tool's result and a partial block that never returns.

    Args:
        rng: The source of all draws.
        arrival: Mean time until the next agent begins, by its number. A tool call takes 1 on average.
        turns: Number of turns of an agent.
        roles: Number of system prompts under which an agent sends its transcript, a random one in each turn.
        helpers: Mean number of agents that a turn starts from its own context. The turn waits until they end.
        rewritten: Probability that a turn replaces its context, after the system prompt or a third of it, by a summary.
        paused: Probability that the next turn comes only after a pause of 60.
    """
    take = new_ids()
    systems = [take(16) for _ in range(6)]
    begun = count()
    tickets = count()
    waiting: list[tuple[float, int, list[list[int]], int]] = [(0.0, next(tickets), [], 0)]
    while True:
        now, _, chains, left = heappop(waiting)
        if not left:
            heappush(waiting, (now + rng.exponential(arrival(next(begun))), next(tickets), [], 0))
            first = int(rng.zipf(1.6))
            chains = [[*systems[(first + role) % len(systems)], *take(near(6)(rng))] for role in range(roles)]
            left = max(1, int(turns(rng)))
        longest = max(map(len, chains))
        role = int(rng.integers(roles))
        grown = take(longest - len(chains[role]) + near(3)(rng))
        chains = [[*chain, *grown] if at == role else chain for at, chain in enumerate(chains)]
        yield [*chains[role], *take(1)], int(20 + 150 * rng.random())
        wait = rng.gamma(2.0, 0.5)
        for _ in range(int(rng.poisson(helpers)) if left > 1 else 0):
            length = max(1, int(near(3)(rng)))
            heappush(waiting, (now + wait, next(tickets), [[*chains[role], *take(2)]] * roles, length))
            wait += length
        if rng.random() < rewritten:
            chains = [[*chain[: max(16, len(chain) // 3)], *take(len(chain) // 6)] for chain in chains]
        if rng.random() < paused:
            wait += 60 * rng.random() + 30
        if left > 1:
            heappush(waiting, (now + wait, next(tickets), chains, left - 1))


KINDS: dict[str, Callable[[Rng, int], Requests]] = {
    "chat": lambda rng, n: chat(rng),
    "agents": lambda rng, n: agents(rng),
    "documents_drifting": lambda rng, n: documents(rng, lambda i: (int(rng.zipf(1.3)) + i // 20) % 3000),
    "hot_set_and_scans": lambda rng, n: scans(rng),
    "scans_and_loops": lambda rng, n: scans_and_loops(rng),
    "tree_search": lambda rng, n: tree(rng),
    "tools": lambda rng, n: tools(rng, lambda i: 1.0),
    "tools_bursts": lambda rng, n: tools(rng, lambda i: 6.0 if i // 20 % 2 else 0.2),
    "tools_branching": lambda rng, n: tools(rng, helpers=0.4),
    "tools_rewriting": lambda rng, n: tools(rng, lambda i: 2.0, near(20), rewritten=0.15),
    "tools_pausing": lambda rng, n: tools(rng, lambda i: 2.0, paused=0.15),
    "tools_roles": lambda rng, n: tools(rng, lambda i: 3.0, near(12), roles=4),
}
STRESS: dict[str, Callable[[Rng, int], Requests]] = {
    "law_flips": flips,
    "law_flips_often": lambda rng, n: alternating(rng, 400),
    "law_flips_quickly": lambda rng, n: alternating(rng, 200),
    "concatenated": concatenated,
}


def generate(kind: str, number: int = 3000, seed: int = 0) -> Trace:
    """Return a trace of `number` requests of a kind."""
    rng = np.random.default_rng(seed)
    rows = list(islice((KINDS | STRESS)[kind](rng, number), number))
    requests = [np.array(blocks, np.int64) for blocks, _ in rows]
    return Trace(kind, 16, requests, [output for _, output in rows], [0.0] * number)


def worst_window(hits: list[int], lru: list[int], window: int) -> float:
    """Return the lowest ratio of hits over `window` requests; 1 if lru hits next to nothing anywhere."""
    ours, base = np.cumsum([0, *hits]), np.cumsum([0, *lru])
    starts = np.arange(0, max(len(hits) - window, 0) + 1, max(window // 4, 1))
    ends = np.minimum(starts + window, len(hits))
    ours, base = ours[ends] - ours[starts], base[ends] - base[starts]
    counts = base > 0.02 * base.mean()
    return float((ours[counts] / base[counts]).min()) if counts.any() else 1.0


def against_lru(trace: Trace, policy: str, capacity: int, window: int) -> tuple[float, float, float]:
    """Return the hit rates of lru and of the policy, and the policy's worst window."""
    each: dict[str, list[int]] = {"lru": [], policy: []}
    rates = {name: replay(trace, name, capacity, hits_of_each=hits).hit_rate for name, hits in each.items()}
    return rates["lru"], rates[policy], worst_window(each[policy], each["lru"], window)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each traffic and capacity."""
    for kind in given.kinds.split(","):
        trace = generate(kind, given.requests, given.seed)
        for share in given.capacity.split(","):
            capacity = max(1, round(float(share.rstrip("%")) / 100 * trace.unique_blocks))
            lru, ours, worst = against_lru(trace, given.policy, capacity, given.window)
            row = {"traffic": trace.name, "requests": len(trace.requests), "capacity_share": share, "blocks": capacity}
            row |= {"policy": given.policy, "lru": f"{lru:.6f}", "hit_rate": f"{ours:.6f}"}
            row |= {"ratio": f"{ours / lru:.6f}" if lru else "nan", "window": given.window}
            yield row | {"worst_window": f"{worst:.4f}"}


main = Experiment(
    "traffic.csv",
    rows,
    {
        "--policy": option("default"),
        "--kinds": option(",".join([*KINDS, *STRESS]), "names, separated by commas"),
        "--capacity": option("3%,10%", "shares of the unique blocks"),
        "--requests": option(3000),
        "--window": option(500, "requests"),
        "--seed": option(0),
    },
    ("traffic", "requests", "capacity_share", "policy"),
).main
