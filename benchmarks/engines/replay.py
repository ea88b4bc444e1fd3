"""Passes of a request trace through an engine's own cache without a model: hit rates, and CPU time in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pc.cache.replay import Trace, load_trace

from ..harness.experiment import option
from ..harness.timing import in_rounds

TURN = 10
"""Steps of a pass before the next pass has its turn."""


class Run(NamedTuple):
    """The outcome of one pass over a trace."""

    hit_rate: float
    """Share of the trace's blocks that were cached."""
    steps: int
    """Steps of a scheduler, or requests."""
    seconds: float
    """CPU time of the engine's code."""
    computed: int = 0
    """Tokens that a scheduler's steps computed."""


Pass = Callable[..., Iterator[Run | None]]
"""From trace, way, capacity, units for each block, requests at once and tokens of an answer to a pass."""


def options(unit: str, policies: str) -> dict[str, Any]:
    """Return the options of a trace that runs through an engine's cache; a block is `--split` of the engine's units."""
    return {
        "trace": option(),
        "--policy": option(action="append", help=f"{policies}; may be given again"),
        "--share": option(0.03, "capacity as a share of the trace's unique blocks"),
        "--requests": option(150, "how many are timed, from the beginning"),
        "--split": option(32, f"{unit} for each block of the trace, when timed"),
        "--longest": option(128, "tokens that a timed request generates at most"),
        "--room": option(0.25, "timed pool as a share of the timed requests' blocks"),
        "--rounds": option(5),
    }


class Comparison(NamedTuple):
    """The measurements of `compare`."""

    trace: Trace
    capacity: int
    """Blocks of the trace."""
    requests: int
    """Timed requests, the first of the trace."""
    room: int
    """Blocks of the trace that the timed pool holds."""
    hit_rates: dict[Any, float]
    """The hit rate of each way, over the whole trace with single requests."""
    runs: dict[Any, list[Run]]
    """Timed passes of each way, one in each round."""


def compare(
    given: argparse.Namespace,
    passing: Pass,
    ways: Sequence[Any],
    at_once: int,
    largest: Callable[[Trace, int, int], int] = lambda trace, split, longest: 1,
) -> Comparison:
    """Measure hit rates over a whole trace, and CPU time over its first requests in turns.

    Args:
        given: The parsed `options`.
        passing: Begins a pass.
        ways: What is compared.
        at_once: Requests that run together in timed passes.
        largest: Returns the units that the largest request needs at least.
    """
    whole = load_trace(given.trace)
    capacity = max(round(given.share * whole.unique_blocks), largest(whole, 1, 1))
    timed = whole.part(0, given.requests / len(whole.requests))
    room = max(round(given.room * timed.unique_blocks), -(-largest(timed, given.split, given.longest) // given.split))
    runs = in_rounds(
        lambda way: passing(timed, way, room, given.split, at_once, given.longest), list(ways), given.rounds
    )
    hit_rates = {way: last(passing(whole, way, capacity, 1, 1, 1)).hit_rate for way in ways}
    return Comparison(whole, capacity, len(timed.requests), room, hit_rates, runs)


def last(passing: Iterator[Run | None]) -> Run:
    """Return the outcome of a pass that has no turns to wait for."""
    *_, found = passing
    assert found is not None
    return found
