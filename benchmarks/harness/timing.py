"""Times side by side: providers take turns, inputs rotate, and what is reported are quantiles over the rounds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Run = Callable[[], object]
Name, Result = TypeVar("Name"), TypeVar("Result")


@dataclass(frozen=True)
class Quantiles:
    """Microseconds of one call."""

    p20: float
    p50: float
    p80: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles:
        """From times of single calls in seconds."""
        low, middle, high = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double())
        return cls(low.item() * 1e6, middle.item() * 1e6, high.item() * 1e6, len(seconds))

    def columns(self, digits: int) -> dict[str, str]:
        """Return the columns of a row."""
        times = {f"{name}_us": f"{getattr(self, name):.{digits}f}" for name in ("p20", "p50", "p80")}
        return times | {"samples": str(self.samples)}


def _rounds(providers: dict[str, list[Run]], once: Callable[[list[Run]], object], seconds: float) -> int:
    """Return how many rounds fill `seconds`, estimated from a warm-up round; odd, so that a median is a sample."""
    start = time.perf_counter()
    for runs in providers.values():
        once(runs)
    took = max(time.perf_counter() - start, 1e-6)
    return int(min(max(seconds / took, 5), 300)) | 1


def time_eager(providers: dict[str, list[Run]], device: torch.device, seconds: float) -> dict[str, Quantiles]:
    """Wall time of a call as Python sees it: on a GPU, the calls of all inputs in a row and then a synchronization.

    Args:
        providers: For each, its runs, one per set of inputs.
        device: Where they run.
        seconds: About how long to measure.
    """

    def once(runs: list[Run]) -> float:
        start = time.perf_counter()
        for run in runs:
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / len(runs)

    def turn(runs: list[Run], i: int) -> list[Run]:
        return runs if device.type == "cuda" else [runs[i % len(runs)]]

    times: dict[str, list[float]] = {name: [] for name in providers}
    order = {name: place for place, name in enumerate(sorted(providers))}
    for i in range(_rounds({name: turn(runs, -1) for name, runs in providers.items()}, once, seconds)):
        for name in sorted(providers, reverse=bool(i % 2)):
            # Each has a set of its own in a round: after another's call the same one would be warm.
            shift = len(providers[name]) * order[name] // len(providers)
            times[name].append(once(turn(providers[name], i + shift)))
    return {name: Quantiles.of(values) for name, values in times.items()}


def capture(runs: list[Run]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call per set of inputs, warmed up."""
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


def time_graphs(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], seconds: float) -> dict[str, Quantiles]:
    """Device time of a call inside a replayed graph, without what the host costs.

    Args:
        graphs: For each provider, its graph and how many calls are in it.
        seconds: About how long to measure.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def once(name: str) -> float:
        graph, calls = graphs[name]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3 / calls

    for name in graphs:
        once(name)
    start = time.perf_counter()
    for name in graphs:
        once(name)
    rounds = int(min(max(seconds / max(time.perf_counter() - start, 1e-6), 9), 300)) | 1
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(rounds):
        for name in sorted(graphs, reverse=bool(i % 2)):
            times[name].append(once(name))
    return {name: Quantiles.of(values) for name, values in times.items()}


class TokenClock:
    """A streamer of transformers that notes when tokens come; generate puts the prompt before them.

    Args:
        now: The time: of the wall, of the process, or of the thread where several take turns.
        pause: Called after each token.
    """

    def __init__(self, now: Callable[[], float], pause: Callable[[], None] = lambda: None) -> None:
        self._now, self._pause = now, pause
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(self._now())
        if len(self.times) > 1:
            self._pause()

    def end(self) -> None:
        """Nothing is held back."""


def over(own: Iterable[float], other: Iterable[float]) -> float:
    """The median of ratios, each of what was measured in the same round."""
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def rotated(names: Iterable[Name], turn: int) -> list[Name]:
    """All of them, begun with another in each turn."""
    names = list(names)
    return names[turn % len(names) :] + names[: turn % len(names)]


def in_turns(passes: dict[Name, Iterator[Result | None]]) -> dict[Name, Result]:
    """Return the results of passes that yield None every few steps, alternating, so that drifts affect all alike."""
    found: dict[Name, Result] = {}

    def turn() -> None:
        for name, each in passes.items():
            if name not in found and (result := next(each)) is not None:
                found[name] = result

    turn()
    gc.collect()
    gc.freeze()  # as engines do once they are made
    while len(found) < len(passes):
        turn()
    gc.unfreeze()
    return found


def in_rounds(
    begin: Callable[[Name], Iterator[Result | None]], names: Sequence[Name], rounds: int
) -> dict[Name, list[Result]]:
    """Return each name's results over several rounds. In a round all names alternate, in a new order."""
    found: dict[Name, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        for name, result in in_turns({name: begin(name) for name in rotated(names, turn)}).items():
            found[name].append(result)
    return found
