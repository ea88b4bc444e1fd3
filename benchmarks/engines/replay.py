"""A request trace through an engine's own cache without a model: hit rates, and CPU time of ways that alternate."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pc.cache.replay import Trace, load_trace, replay

from ..harness.experiment import Experiment, option
from ..harness.timing import by_turns, median, over


class Run(NamedTuple):
    """The outcome of one pass over a trace."""

    hit_rate: float
    """Share of the trace's blocks that were cached."""
    steps: int
    """Steps of a scheduler, or requests."""
    seconds: float
    """CPU time of the engine's code."""


Way = Any
"""A policy of an engine, as its passes take it."""
OPTIONS: dict[str, Any] = {
    "trace": option(),
    "--policy": option([], "names; without them the engine's own policies and ours"),
    "--share": option([0.03], "capacities as shares of the trace's unique blocks"),
    "--requests": option(150, "how many are timed, from the beginning"),
    "--split": option(32, "blocks of the engine for each block of the trace, when timed"),
    "--longest": option(128, "tokens that a timed request generates at most"),
    "--room": option(0.25, "timed pool as a share of the timed requests' blocks"),
    "--rounds": option(5),
}


class Engine(NamedTuple):
    """An engine's cache.

    Attributes:
        run: Function from trace, way, capacity, blocks of the engine for each block of the trace, requests at once and
            tokens of an answer to the outcome of one pass.
        ways: Function from names of policies (none: the usual ones) to each way with its columns of a row.
        bases: Ways that CPU time is divided by, by the ends of the columns' names.
        at_once: Requests that run together in timed passes.
        largest: Function from trace, blocks of the engine for each block and tokens of an answer to the blocks of the
            engine that the largest request needs.
    """

    run: Callable[..., Run]
    ways: Callable[[Sequence[str]], Mapping[Way, Mapping[str, str]]]
    bases: Mapping[str, Way]
    at_once: int = 1
    largest: Callable[[Trace, int, int], int] = lambda trace, split, longest: 1

    def experiment(self, file: str, help: str | None) -> Experiment:
        """Return the benchmark of this engine, with the docstring of its module."""
        return Experiment(file, self.rows, OPTIONS, help=help)

    def rows(self, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """Yield a row for each capacity and way.

        CPU time is that of the first requests of the trace in a small pool, where ways alternate. Hit rates are those
        of single requests over the whole trace.
        """
        whole, ways = load_trace(given.trace), self.ways(given.policy)
        timed = whole.part(0, given.requests / len(whole.requests))
        least = -(-self.largest(timed, given.split, given.longest) // given.split)
        room = max(round(given.room * timed.unique_blocks), least)
        timed_run = functools.partial(
            self.run, timed, capacity=room, split=given.split, at_once=self.at_once, longest=given.longest
        )
        runs = by_turns(timed_run, ways, given.rounds)
        for share in given.share:
            capacity = max(round(share * whole.unique_blocks), self.largest(whole, 1, 1))
            for way, names in ways.items():
                own, policy = runs[way], names["policy"].removeprefix("pc_")
                replayed = replay(whole, "lru" if policy == "vllm" else policy, capacity)
                row = {"trace": whole.name, "share": f"{share:g}", "blocks": capacity, **names}
                row["hit_rate"] = f"{self.run(whole, way, capacity).hit_rate:.4f}"
                row |= {"replay_hit_rate": f"{replayed.hit_rate:.4f}", "requests": len(timed.requests)}
                row |= {"timed_blocks": room, "timed_units": room * given.split, "steps": own[0].steps}
                row["step_us"] = median((run.seconds / run.steps for run in own), 1e6)
                for name, base in self.bases.items():
                    ratio = over(*((run.seconds for run in each) for each in (own, runs[base])))
                    row[f"over_{name}"] = f"{ratio:.3f}"
                yield row
