"""Times side by side: providers take turns, and inputs rotate."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

Run = Callable[[], object]
Name, Result = TypeVar("Name"), TypeVar("Result")


def _alternate(
    once: Callable[[str, int], float], names: Iterable[str], seconds: float, least: int
) -> dict[str, list[float]]:
    """Return the seconds that `once(name, round)` returns in each round, for as many rounds as fill `seconds`.

    The number of rounds is estimated from a warm-up round, is at least `least`, and odd, so that a median is a sample.
    """
    names = sorted(names)
    start = time.perf_counter()
    for name in names:
        once(name, -1)
    took = max(time.perf_counter() - start, 1e-6)
    rounds = int(min(max(seconds / took, least), 300)) | 1
    return by_turns(once, names, rounds, itertools.count().__next__)


def time_eager(providers: dict[str, list[Run]], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Measure the wall time of a call. On a GPU, the calls of all inputs are followed by one synchronization.

    Args:
        providers: Runs of each provider, one for each set of inputs.
        device: The device that they run on.
        seconds: Approximate time of the measurement.
    """
    order = {name: place for place, name in enumerate(sorted(providers))}

    def once(name: str, i: int) -> float:
        runs = providers[name]
        if device.type != "cuda":
            # In a round each provider has its own set; a set that another provider has just used would be warm.
            runs = [runs[(i + len(runs) * order[name] // len(providers)) % len(runs)]]
        start = time.perf_counter()
        for run in runs:
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / len(runs)

    return _alternate(once, providers, seconds, 5)


def capture(runs: list[Run]) -> torch.cuda.CUDAGraph:
    """Return a warmed-up CUDA graph of one call for each set of inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def time_graphs(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], seconds: float) -> dict[str, list[float]]:
    """Measure the device time of a call inside a replayed graph, without the cost of the host.

    Args:
        graphs: Graph of each provider and the number of its calls.
        seconds: Approximate time of the measurement.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def once(name: str, i: int) -> float:
        graph, calls = graphs[name]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3 / calls

    for name in graphs:
        once(name, -1)  # the first replay of a graph takes longer
    return _alternate(once, graphs, seconds, 9)


class TokenClock:
    """A streamer of transformers that notes the time of each token by a clock; generate first puts the prompt."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(self._now())

    def end(self) -> None:
        """Do nothing: no token is held back."""


def median(times: Iterable[float], scale: float = 1, digits: int = 1) -> str:
    """Return the median of times as the text of a column, multiplied by `scale`."""
    return f"{statistics.median(times) * scale:.{digits}f}"


def over(own: Iterable[float], other: Iterable[float]) -> float:
    """Return the median of ratios of two measurements in the same round."""
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def by_turns(
    measure: Callable[..., Result], names: Iterable[Name], rounds: int, draw: Callable[[], object] | None = None
) -> dict[Name, list[Result]]:
    """Return what `measure` returns for each name in each round; rounds go forwards and backwards.

    Args:
        measure: Function from a name, and from what the round has drawn, to a result.
        names: What is compared.
        rounds: Number of rounds.
        draw: Function that returns what all names of a round measure; None: `measure` takes a name only.
    """
    found: dict[Name, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        drawn = () if draw is None else (draw(),)
        for name in reversed(found) if turn % 2 else found:
            found[name].append(measure(name, *drawn))
    return found


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Keep the garbage collector away from all objects made so far, as engines do once they are made."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
