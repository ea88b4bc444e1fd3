"""Caching hidden states on the CPU: TensorCache against plain copies and the ways of other systems.

Usage:

    python -m benchmarks hidden_states

All providers alternate in one process. A miss stores a whole prompt and passes its tensor to the next stage. A hit
stores the last quarter and passes the whole tensor. A decode step stores one token. "step" is the work done once a step
for all tensors, mostly its slots. All providers use the block tables of a manager that evicts, so all write to memory
that was not written for a while. Managing blocks is not timed. "plain copy" is the floor: it copies rows to given
places.
OMP_NUM_THREADS threads (1).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import pc

from ..harness.experiment import Experiment, option
from ..harness.timing import Quantiles, rotated

BLOCK_SIZE = 16
HIT = 0.75
SIZES = ((256, 4096), (1024, 4096), (4096, 4096), (16384, 2048))
"""Tokens and features."""

Work = tuple[Callable[[], Any], Callable[[], torch.Tensor]]


class Follower:
    """Block tables of a request after the other, over a pool of four prompts."""

    def __init__(self, tokens: int) -> None:
        self.num_blocks = 4 * tokens // BLOCK_SIZE + 64
        self.manager = pc.CacheManager(self.num_blocks, BLOCK_SIZE, policy="lru")
        self.running = ""

    def begin(self, request: str, prompt: np.ndarray) -> int:
        """Begin a request, end the one before, and return how many tokens must be computed."""
        if self.running:
            self.manager.free(self.running)
        self.running = request
        self.allocation = self.manager.allocate(request, prompt)
        self.cached = self.allocation.num_cached_tokens
        return len(prompt) - self.cached

    def decode(self) -> None:
        """Add a token to the running request."""
        self.cached = self.manager.num_tokens(self.running)
        self.allocation = self.manager.append(self.running, [7])

    def commit(self) -> None:
        """Publish the request's blocks."""
        self.manager.commit(self.running, self.manager.num_tokens(self.running))


class Ours(Follower):
    """TensorCache along a CacheManager."""

    name, version = "pc", pc.__version__

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__(tokens)
        self.cache = pc.TensorCache(self.manager, self.num_blocks, BLOCK_SIZE, max_bytes=16 << 30)
        self.cache.register("hidden", (features,), torch.bfloat16)
        self.cache.rows("hidden").zero_()  # the rivals' memory has been touched too

    def work(self, hidden: torch.Tensor) -> Work:
        """Return a function that stores a step, and one that returns its whole tensor (of a decode: the new row)."""
        step = pc.Step.of({self.running: self.allocation}, {"hidden": hidden})
        if len(hidden) == 1:
            return lambda: self.cache.store(step), lambda: hidden
        return lambda: self.cache.store(step), lambda: self.cache.join(step)[self.running]["hidden"]


class PlainCopy(Follower):
    """Rows one behind the other in a ring as large as the others' caches: what copying alone costs."""

    name, version = "plain copy", torch.__version__

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__(tokens)
        self.ring = torch.zeros(self.num_blocks * BLOCK_SIZE, features, dtype=torch.bfloat16)
        self.next, self.prompt = 0, 0

    def work(self, hidden: torch.Tensor) -> Work:
        if self.next + len(hidden) > len(self.ring):
            self.next = 0
        first = self.next
        self.next += len(hidden)
        if not self.cached:
            self.prompt = first
        cached = slice(self.prompt, self.prompt + self.cached)

        def store() -> None:
            self.ring[first : first + len(hidden)].copy_(hidden)

        if not self.cached or len(hidden) == 1:
            return store, lambda: hidden
        return store, lambda: torch.cat([self.ring[cached], hidden])


class CopyPerBlock(Follower):
    """A host tensor per block, copied one by one, and concatenated: the loop over chunks of LMCache's local backend."""

    name, version = "copy per block", torch.__version__

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__(tokens)
        empty = torch.zeros(BLOCK_SIZE, features, dtype=torch.bfloat16)
        self.blocks = [empty.clone() for _ in range(self.num_blocks)]

    def work(self, hidden: torch.Tensor) -> Work:
        table = self.manager.block_table(self.running).tolist()
        first = self.cached // BLOCK_SIZE
        before, after = table[:first], table[first:]

        def store() -> None:
            for i, block in enumerate(after):
                self.blocks[block] = hidden[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE].clone()

        def load() -> torch.Tensor:
            return torch.cat([*(self.blocks[block] for block in before), hidden])

        return store, load if before and len(hidden) > 1 else lambda: hidden


class Indexing(Follower):
    """A flat cache, indexed assignment, and blocks by index in front of the new rows: how vLLM-Omni 0.20 does it."""

    name, version = "indexing", torch.__version__

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__(tokens)
        self.cache = torch.zeros(self.num_blocks, BLOCK_SIZE, features, dtype=torch.bfloat16)

    def work(self, hidden: torch.Tensor) -> Work:
        table = torch.from_numpy(self.manager.block_table(self.running)).long()
        positions = torch.arange(self.cached, self.cached + len(hidden))
        slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        blocks = table[: self.cached // BLOCK_SIZE]
        load = (lambda: self.load(blocks, hidden)) if len(blocks) and len(hidden) > 1 else lambda: hidden
        return lambda: self.store(slots, hidden), load

    def store(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write rows into their slots."""
        self.cache.flatten(0, 1)[slots] = hidden

    def load(self, blocks: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return cached blocks, then the new rows."""
        return torch.cat([self.cache[blocks].flatten(0, 1), hidden])


class IndexSelect(Indexing):
    """The same with PyTorch's fastest operators for it."""

    name = "index_copy_, index_select"

    def store(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        self.cache.flatten(0, 1).index_copy_(0, slots, hidden)

    def load(self, blocks: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.cache.index_select(0, blocks).flatten(0, 1), hidden])


PROVIDERS = (Ours, PlainCopy, CopyPerBlock, Indexing, IndexSelect)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the microseconds of a call, and its result."""
    begin = time.perf_counter()
    result = function()
    return (time.perf_counter() - begin) * 1e6, result


def measure(tokens: int, features: int, rounds: int) -> dict[tuple[type, str], Quantiles]:
    """Return microseconds by provider and part of a step; providers alternate in rounds."""
    times: dict[tuple[type, str], list[float]] = {}
    runners = [make(tokens, features) for make in PROVIDERS]
    hit_tokens = int(tokens // BLOCK_SIZE * HIT) * BLOCK_SIZE
    for turn in range(rounds):
        prompt = np.arange(tokens) + 1000 * turn
        other = prompt.copy()
        other[hit_tokens:] += 500_000
        hidden = torch.randn(tokens, features, dtype=torch.bfloat16)
        suffix, row = torch.randn_like(hidden[hit_tokens:]), torch.randn_like(hidden[:1])
        for runner in rotated(runners, turn):
            for what, ids, new in (("miss", prompt, hidden), ("hit", other, suffix)):
                left = runner.begin(f"{what}{turn}", ids)
                assert left == len(new), (runner.name, left, len(new))
                took, (store, load) = timed(lambda: runner.work(new))  # noqa: B023 - called at once
                times.setdefault((type(runner), f"{what} step"), []).append(took)
                for part, function in (("store", store), ("load", load)):
                    took, result = timed(function)
                    times.setdefault((type(runner), f"{what} {part}"), []).append(took)
                whole = hidden if what == "miss" else torch.cat([hidden[:hit_tokens], suffix])
                assert torch.equal(result, whole), runner.name
                del result
                runner.commit()
            runner.decode()
            took, (store, _) = timed(lambda: runner.work(row))  # noqa: B023 - called at once
            times.setdefault((type(runner), "decode step"), []).append(took)
            times.setdefault((type(runner), "decode store"), []).append(timed(store)[0])
    return {key: Quantiles.of([took / 1e6 for took in values[1:]]) for key, values in times.items()}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each size, provider and part of a step."""
    for tokens, features in SIZES:
        if tokens <= given.longest:
            for (provider, what), took in measure(tokens, features, given.rounds).items():
                row = {"provider": provider.name, "version": provider.version, "what": what}
                yield row | {"tokens": tokens, "features": features} | took.columns(1)


main = Experiment(
    "hidden_states.csv",
    rows,
    {"--rounds": option(21), "--longest": option(SIZES[-1][0], "tokens of a prompt at most")},
).main
